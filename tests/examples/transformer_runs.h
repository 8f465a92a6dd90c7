// Runs of the transformer's example, and how far their losses are from one process'.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

namespace transformer_runs {

using Lines = std::vector<std::string>;

inline ddp::testing::JobEnded transformer_on(int ranks, Lines arguments, const Lines& more) {
  arguments.insert(arguments.begin(), TRANSFORMER_PROGRAM);
  arguments.insert(arguments.end(), more.begin(), more.end());
  return ddp::testing::run_job(ranks, arguments, ddp::testing::within(std::chrono::minutes(2)));
}

/// Of rank 0's lines, those after such a word.
inline std::vector<double> losses(const ddp::testing::JobEnded& job, const std::string& name) {
  std::vector<double> found;
  const std::regex pattern(name + R"( ([\d.]+),)");
  for (const auto& line : job.ranks[0]) {
    std::smatch match;
    if (std::regex_search(line, match, pattern)) found.push_back(std::stod(match[1]));
  }
  return found;
}

/// 4,000 characters, 27 different ones, which neither 2 nor 4 ranks divide.
inline std::string letters_and_spaces() {
  std::string text;
  unsigned number = 1;
  while (text.size() < 4000) {
    number = number * 1103515245 + 12345;
    const unsigned letter = number >> 16 & 31;
    text += letter < 26 ? static_cast<char>('a' + letter) : ' ';
  }
  return text;
}

/// One process' run of 8 windows a step, and those of ranks that share them.
class SharedRuns {
 public:
  /// \param more  options of all runs.
  explicit SharedRuns(const Lines& more, int heads = 4, int layers = 2) {
    // Gradients are longer than 0.1, each step's by another factor.
    arguments_ = {"--text",         folder_.write("text", letters_and_spaces()),
                  "--width",        "32",
                  "--context",      "16",
                  "--heads",        std::to_string(heads),
                  "--layers",       std::to_string(layers),
                  "--steps",        "20",
                  "--warmup",       "5",
                  "--lr",           "0.005",
                  "--clip",         "0.1",
                  "--report-every", "1",
                  "--sample",       "40",
                  "--dropout",      "0"};
    arguments_.insert(arguments_.end(), more.begin(), more.end());
    alone_ = transformer_on(1, arguments_, {"--batch-size", "8"});
  }

  /// \return the largest difference of a loss, in parts of it; infinity if the run failed.
  double distance_of(int ranks, const Lines& share) {
    shared_ = transformer_on(ranks, arguments_, share);
    return distance_of_last(20);
  }

  /// The same, with a checkpoint after step 10.
  double distance_of_saving(int ranks, Lines share) {
    ddp::testing::run({"rm", "-rf", saved_});
    share.insert(share.end(), {"--checkpoint", saved_, "--checkpoint-every", "10"});
    return distance_of(ranks, share);
  }

  /// The same for steps 11 to 20, which go on from there.
  double distance_of_resumed(int ranks, Lines share) {
    const auto resumed = folder_.file("resumed");
    ddp::testing::run({"rm", "-rf", resumed});
    ddp::testing::run({"mkdir", resumed});
    ddp::testing::run({"cp", "-r", saved_ + "/step-00000010", resumed});
    share.insert(share.end(), {"--checkpoint", resumed, "--resume"});
    shared_ = transformer_on(ranks, arguments_, share);
    return distance_of_last(10);
  }

  /// Whether the last one sampled what one process does.
  bool samples_alike() const { return shared_.ranks[0].back() == alone_.ranks[0].back(); }
  /// Whether it printed the size of the model that one process does.
  bool sizes_alike() const {
    const auto size = [](const ddp::testing::JobEnded& job) {
      std::smatch match;
      return std::regex_search(job.output, match, std::regex(R"(training \d+ parameters)"))
                 ? match.str()
                 : "no size of " + std::to_string(job.code);
    };
    return size(alone_) == size(shared_);
  }
  std::string output() const { return alone_.output + shared_.output; }
  const ddp::testing::JobEnded& alone() const { return alone_; }

 private:
  double distance_of_last(size_t steps) const {
    double most = 0;
    for (const auto* name : {"loss", "held out"}) {
      auto expected = losses(alone_, name);
      const auto got = losses(shared_, name);
      if (shared_.code != 0 || expected.size() != 20 || got.size() != steps) return INFINITY;
      expected.erase(expected.begin(), expected.end() - static_cast<std::ptrdiff_t>(steps));
      for (size_t i = 0; i < got.size(); ++i) {
        most = std::max(most, std::abs(got[i] - expected[i]) / expected[i]);
      }
    }
    return most;
  }

  const ddp::testing::TemporaryFolder folder_;
  const std::string saved_ = folder_.file("saved");
  Lines arguments_;
  ddp::testing::JobEnded alone_, shared_;
};

}  // namespace transformer_runs
