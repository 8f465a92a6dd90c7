// differential: draws training programs, runs them on ranks, and compares them with one process.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <random>
#include <set>

#include <CLI/CLI.hpp>

#include "differential/shrink.h"
#include "differential/worker.h"

namespace ddp::differential {
namespace {

struct Options {
  double seconds = 0;
  uint64_t seed = 0;
  uint64_t programs = 0;
  std::string ranks, backend, program, corpus;
  std::vector<std::string> only;
  bool list = false, cpp = false, shrink = true, keep_going = false, unseen = true;
};

void list() {
  for (const auto& choice : choices()) {
    for (const auto& value : choice.values) {
      std::printf("%s=%s %s\n", choice.name.c_str(), value.label.c_str(), value.options.c_str());
    }
  }
}

/// Runs once more, so that a machine that was slow for a moment is no finding.
Outcome run_twice(Worker& worker, const Program& program) {
  auto outcome = worker.run(program);
  if (outcome.kind == "late" || outcome.kind == "hang") outcome = worker.run(program);
  return outcome;
}

/// Makes a finding smaller, and prints it, where none before it is a part of it.
class Findings {
 public:
  Findings(Worker& worker, bool may_shrink) : worker_(worker), may_shrink_(may_shrink) {}

  void add(const Program& program, const Outcome& outcome) {
    ++count_;
    for (const auto& [kind, smallest] : smallest_) {
      if (kind == outcome.kind && contains(program, smallest)) return;
    }
    std::printf("FINDING %s\n", outcome.kind.c_str());
    auto smallest = program;
    auto last = outcome;
    if (may_shrink_) {
      smallest = shrink(program, outcome, [&](const Program& candidate) {
        return run_twice(worker_, candidate);
      });
      const auto again = run_twice(worker_, smallest);
      if (!again.kind.empty()) last = again;
      smallest_.emplace_back(last.kind, smallest);
    }
    std::printf("%s\n", last.text.c_str());
    std::printf("minimal: differential --program '%s'\n", text_of(smallest).c_str());
    std::printf(
        "repeat:  differential --seed %llu --programs 1\n",
        static_cast<unsigned long long>(program.seed));
    std::fflush(stdout);
  }
  uint64_t count() const { return count_; }

 private:
  Worker& worker_;
  bool may_shrink_;
  uint64_t count_ = 0;
  std::vector<std::pair<std::string, Program>> smallest_;
};

/// Which pairs of values have run together.
class Coverage {
 public:
  void add(const Program& program) {
    const auto taken = program.taken();
    for (size_t i = 0; i < taken.size(); ++i) {
      for (size_t j = i + 1; j < taken.size(); ++j) seen_.emplace(taken[i], taken[j]);
    }
  }
  /// Of those that the rules allow.
  void print_unseen() const {
    for (const auto& pair : pairs()) {
      if (seen_.count(pair) == 0) {
        std::printf("pair %s x %s\n", pair.first.c_str(), pair.second.c_str());
      }
    }
  }

 private:
  std::set<std::pair<std::string, std::string>> seen_;
};

std::vector<Program> programs_in(const std::string& path) {
  std::vector<Program> programs;
  std::ifstream file(path);
  if (!path.empty() && !file) throw std::invalid_argument("cannot read " + path);
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') programs.push_back(parse(line));
  }
  return programs;
}

int run(const Options& options) {
  if (options.list) return list(), 0;
  if (options.cpp) return std::printf("%s", Worker().print(parse(options.program)).c_str()), 0;
  Fixed fixed;
  if (!options.ranks.empty()) fixed["ranks"] = options.ranks;
  if (!options.backend.empty()) fixed["backend"] = options.backend;
  for (const auto& only : options.only)
    fixed[only.substr(0, only.find('='))] = only.substr(only.find('=') + 1);
  Worker worker;
  Findings findings(worker, options.shrink && options.program.empty());
  Coverage coverage;
  uint64_t count = 0;
  std::map<std::string, uint64_t> invalid;  // by LibTorch's text
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto run_one = [&](const Program& program) {
    const auto outcome = run_twice(worker, program);
    ++count;
    if (outcome.kind == "invalid") {
      ++invalid[outcome.text];
    } else {
      coverage.add(program);
    }
    if (outcome.kind.empty() || outcome.kind == "invalid") return true;
    findings.add(program, outcome);
    return false;
  };
  if (!options.program.empty()) {
    run_one(parse(options.program));
  } else if (!options.corpus.empty()) {
    for (const auto& program : programs_in(options.corpus)) run_one(program);
  } else {
    std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
    std::fflush(stdout);
    for (uint64_t i = 0;
         i < options.programs || (options.programs == 0 && elapsed() < options.seconds); ++i) {
      if (!run_one(draw(options.seed + i, fixed)) && !options.keep_going) break;
    }
  }
  std::printf(
      "%llu programs, %llu findings, %.1f a second\n", static_cast<unsigned long long>(count),
      static_cast<unsigned long long>(findings.count()), static_cast<double>(count) / elapsed());
  for (const auto& [text, times] : invalid) {
    std::printf(
        "LibTorch refuses %llu: %s\n", static_cast<unsigned long long>(times), text.c_str());
  }
  if (options.program.empty() && options.corpus.empty() && options.unseen) coverage.print_unseen();
  return findings.count() > 0 ? 1 : 0;
}

}  // namespace
}  // namespace ddp::differential

int main(int argc, char** argv) {
  CLI::App app(
      "Draws training programs from a seed, runs each on ranks, and compares it with one process "
      "in double.");
  ddp::differential::Options options;
  options.seed = std::random_device{}();
  options.seconds = 60;
  app.add_option("--seconds", options.seconds, "how long to draw; default: 60")
      ->check(CLI::PositiveNumber);
  app.add_option(
      "--seed", options.seed,
      "of the first program; the next ones have the numbers after it. Default: random");
  app.add_option("--programs", options.programs, "how many, in place of --seconds")
      ->check(CLI::PositiveNumber);
  app.add_option("--ranks", options.ranks, "programs with this number of ranks");
  app.add_option("--backend", options.backend, "programs over this backend");
  app.add_option("--only", options.only, "programs with this value: name=label; may be repeated");
  app.add_option("--program", options.program, "the program that a finding printed");
  app.add_option("--corpus", options.corpus, "runs the programs of this file, a line each");
  app.add_flag("--cpp", options.cpp, "prints --program as C++, as far as it runs");
  app.add_flag(
      "--list", options.list, "prints the choices, one a line, with the names that they call");
  app.add_flag("--keep-going", options.keep_going, "draws on after a finding");
  app.add_flag("!--no-shrink", options.shrink, "prints findings as they were drawn");
  app.add_flag("!--no-pairs", options.unseen, "does not print the pairs that were not seen");
  CLI11_PARSE(app, argc, argv);
  try {
    return ddp::differential::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "differential: %s\n", error.what());
    return 2;
  }
}
