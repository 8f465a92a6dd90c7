// The ranks of a program, as threads, and the comparison of what they had with the reference.
#include <mutex>
#include <sstream>
#include <thread>

#include <ATen/Parallel.h>
#include <ddp/internal/check.h>

#include "differential/lists.h"
#include "differential/rounding.h"
#include "differential/run.h"
#include "differential/worker.h"
#include "reducer/gradients/direct_gradient.h"
#include "support/foreign_locale.h"
#include "support/temporary_folder.h"

namespace ddp::differential {
namespace {

using Clock = std::chrono::steady_clock;

/// What a rank threw, and when.
struct Failure {
  std::string text;
  Clock::time_point at;
};

/// The groups of a process, which programs share until one of them fails.
class Groups {
 public:
  std::vector<ProcessGroup>& of(const std::string& backend, int size) {
    auto& groups = groups_[{backend, size}];
    if (groups.empty()) {
      testing::RanksOptions options;
      options.collective_timeout = std::chrono::seconds(8);
      options.backend = backend;
      groups = testing::run_ranks<ProcessGroup>(
          size, [](const Rank& self) { return self.group; }, options);
    }
    return groups;
  }
  void drop(const std::string& backend, int size) { groups_.erase({backend, size}); }

 private:
  std::map<std::pair<std::string, int>, std::vector<ProcessGroup>> groups_;
};

/// What the process has while a program runs.
class Surroundings {
 public:
  explicit Surroundings(const Program& program) : dtype_(torch::get_default_dtype()) {
    if (program.is("dtype", "double")) torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    if (program.is("dtype", "bfloat16"))
      torch::set_default_dtype(caffe2::TypeMeta::Make<c10::BFloat16>());
    if (program.has("locale")) locale_ = std::locale::global(testing::foreign_locale());
    DirectGradient::least_bytes = program.is("backend", "shm_direct") ? 1 : usual_;
  }
  ~Surroundings() {
    torch::set_default_dtype(dtype_);
    std::locale::global(locale_);
    TORCH_CHECK(::chdir("/tmp") == 0, "chdir");
    DirectGradient::least_bytes = usual_;
  }

 private:
  caffe2::TypeMeta dtype_;
  std::locale locale_;
  const size_t usual_ = 0;
};

class Job {
 public:
  Job(const Program& program, Groups& groups) : program_(program), groups_(groups) {}

  void run(const std::string& folder) {
    for (int step = 0; step < program_.number("steps") && failures_.empty();) {
      run_ranks(step, folder);
      step = step < reload_step(program_) ? reload_step(program_) : program_.number("steps");
    }
  }

  std::vector<Record> records;
  Trace trace;
  /// By rank; empty where none failed.
  std::map<int, Failure> failures_;
  int size_ = 0;  ///< ranks of the last part

 private:
  void run_ranks(int first_step, const std::string& folder) {
    const int size = size_ = ranks_of(program_, first_step);
    const auto backend = program_.label("backend");
    auto& groups = groups_.of(backend, size);
    trace.begin(size);
    std::vector<Record> own(static_cast<size_t>(size));
    std::vector<std::thread> threads;
    std::mutex mutex;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        at::set_num_threads(1);
        Rank self{rank, size, groups[static_cast<size_t>(rank)], nullptr};
        Trace off;
        auto& trace = rank == 0 ? this->trace : off;
        auto text = problem_of([&] {
          RankRun run(program_, self, first_step, trace);
          run.folder = folder;
          try {
            run.run();
          } catch (...) {
            own[static_cast<size_t>(rank)] = run.record;
            throw;
          }
          own[static_cast<size_t>(rank)] = run.record;
        });
        if (text.empty()) return;
        {
          const std::lock_guard<std::mutex> lock(mutex);
          failures_[rank] = {text, Clock::now()};
        }
        // As a process ends that threw.
        self.group = {};
        groups[static_cast<size_t>(rank)] = {};
      });
    }
    for (auto& thread : threads) thread.join();
    if (!failures_.empty()) groups_.drop(backend, size);
    if (records.size() < own.size()) records.resize(own.size());
    for (size_t rank = 0; rank < own.size(); ++rank)
      records[rank].insert(own[rank].begin(), own[rank].end());
  }

  const Program& program_;
  Groups& groups_;
};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string difference(
    const std::string& name, int rank, const at::Tensor& got, const at::Tensor& expected,
    double allowed) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << name << " on rank " << rank << ": ";
  if (!got.defined() || !expected.defined()) {
    if (got.defined() == expected.defined()) return "";
    text << (got.defined() ? "there, and one process has none" : "none, and one process has one");
    return text.str();
  }
  if (got.sizes() != expected.sizes()) {
    text << "shape " << got.sizes() << ", one process has " << expected.sizes();
    return text.str();
  }
  if (got.numel() == 0) return "";
  const auto as = got.is_complex() ? torch::kComplexDouble : torch::kDouble;
  const auto a = got.to(as).flatten(), b = expected.to(as).flatten();
  const auto difference = (a - b).abs();
  const double largest = difference.max().item<double>();
  if (largest <= allowed + 1e-9 * b.abs().max().item<double>()) return "";
  const auto at = difference.argmax().item<int64_t>();
  text.precision(12);
  text << "element " << at << " is " << torch::real(a[at]).item<double>() << ", one process has "
       << torch::real(b[at]).item<double>();
  return text.str();
}

/// The largest value of the reference.
double largest(const std::vector<Record>& records) {
  double result = 0;
  for (const auto& record : records) {
    for (const auto& [name, value] : record) {
      if (!value.defined() || value.numel() == 0) continue;
      const double own = value.abs().max().to(torch::kDouble).item<double>();
      result = std::isnan(own) ? std::numeric_limits<double>::infinity() : std::max(result, own);
    }
  }
  return result;
}

using Bounds = std::vector<std::map<std::string, double>>;

/// Up to six values that are further from the reference than 1e-9 of it, and the bounds.
std::string differences(
    const std::vector<Record>& got, const std::vector<Record>& expected, Bounds bounds) {
  std::string text;
  int lines = 0;
  bounds.resize(expected.size());
  // Small values come of larger ones.
  const double rounding = 1e-12 * std::max(1.0, largest(expected));
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    for (const auto& [name, value] : expected[rank]) {
      const auto found = got.at(rank).find(name);
      if (found == got[rank].end()) continue;
      const auto line = difference(
          name, static_cast<int>(rank), found->second, value, rounding + bounds[rank][name]);
      if (!line.empty() && ++lines <= 6) text += "\n  " + line;
    }
  }
  return text;
}

/// Parameters of ranks that are not rank 0's to the bit, where they have to be.
std::string unequal_replicas(const Program& program, const std::vector<Record>& got) {
  std::string text;
  for (size_t rank = 1; rank < got.size(); ++rank) {
    for (const auto& [name, value] : got[rank]) {
      if (name.find(" parameter ") == std::string::npos) continue;
      const auto& first = got[0].find(name);
      if (!are_equal_after(program, name[0] == 'e' ? program.number("steps") - 1 : std::stoi(name)))
        continue;
      if (first == got[0].end() || !value.defined() || at::equal(first->second, value)) continue;
      text += "\n  " + name + " is not rank 0's on rank " + std::to_string(rank);
    }
  }
  return text;
}

std::string compare(
    const Program& program, const std::vector<Record>& got, const std::vector<Record>& expected) {
  auto text = differences(got, expected, {});
  if (!text.empty()) text = differences(got, expected, bounds_of(program, expected));
  return text + unequal_replicas(program, got);
}

/// Whether a program that throws does so within calls of the library, which then knows the cause.
bool is_in_library(const Program& program) {
  if (program.is("exception", "loop")) return false;
  if (program.is("exception", "optimizer")) return program.is("stepping", "in_backward");
  if (program.is("exception", "forward")) return !program.is("units", "no_root");
  // In a backward pass whose gradients stay where they are, the library does nothing.
  const bool is_local = program.is("passes", "accumulate|sync_in_backward");
  return !(is_local && program.is("exception", "loss_function|output_hook"));
}

Outcome judge_failures(const Program& program, const Job& job) {
  auto texts = refusals(program);
  if (program.has("exception")) texts.push_back(kDeliberate);
  std::string all;
  for (const auto& [rank, failure] : job.failures_) {
    all += "\n  rank " + std::to_string(rank) + ": " + failure.text.substr(0, 400);
  }
  const auto is_refused = [&](const auto& item) {
    const auto has = [&](const std::string& part) {
      return item.second.text.find(part) != std::string::npos;
    };
    return std::any_of(texts.begin(), texts.end(), has);
  };
  const bool all_threw = static_cast<int>(job.failures_.size()) == job.size_;
  if (all_threw && std::all_of(job.failures_.begin(), job.failures_.end(), is_refused)) return {};
  if (program.has("exception") && all_threw && !refusals(program).empty()) return {};
  if (program.has("exception") && refusals(program, /*certain=*/true).empty()) {
    if (static_cast<int>(job.failures_.size()) < job.size_)
      return {"silence", "an exception on the last rank, and the others go on" + all};
    Clock::time_point first = Clock::time_point::max(), last = Clock::time_point::min();
    for (const auto& [rank, failure] : job.failures_) {
      first = std::min(first, failure.at), last = std::max(last, failure.at);
      if (is_in_library(program) && failure.text.find(kDeliberate) == std::string::npos) {
        return {"error", "the cause is not in each text:" + all};
      }
    }
    if (last - first > std::chrono::seconds(2))
      return {"late", "the last rank threw more than 2 s after the first:" + all};
    return {};
  }
  if (texts.empty()) return {"error", all};
  return {
      "error",
      (all_threw ? "the documentation says \"" + texts[0] + "\"; got" : "not every rank threw:") +
          all};
}

Groups& groups() {
  static Groups all;
  return all;
}

}  // namespace

std::map<std::string, double> reference_sums(const Program& program) {
  std::map<std::string, double> result;
  const auto records = reference(program);
  const std::string prefix = "end parameter ";
  for (const auto& [name, value] : records.at(0)) {
    if (name.compare(0, prefix.size(), prefix) == 0)
      result[name.substr(prefix.size())] = checksum(value);
  }
  return result;
}

std::string run_as_process(const Program& program, const std::string& folder) {
  const Surroundings surroundings(program);
  std::optional<save_on_host> engine;
  if (program.is("recompute", "saved_on_host")) engine.emplace();
  at::set_num_threads(1);
  return problem_of([&] {
    init_process_group(ProcessGroupOptions()
                           .backend(program.is("backend", "gloo") ? "gloo" : "shm")
                           .timeout(std::chrono::seconds(8)));
    const Rank self{get_rank(), get_world_size(), default_group(), nullptr};
    Trace off;
    {
      RankRun run(program, self, 0, off);
      run.is_process = true;
      run.is_pretended = ::getenv("DDP_PRETEND") != nullptr;
      run.folder = folder;
      run.run();
    }
    destroy_process_group();
  });
}

Outcome run_here(const Program& program, const std::string& trace) {
  const Surroundings surroundings(program);
  std::optional<save_on_host> engine;
  if (program.is("recompute", "saved_on_host")) engine.emplace();  // before a rank runs backward
  std::vector<Record> expected;
  const auto invalid = problem_of([&] { expected = reference(program); });
  if (!invalid.empty()) return {"invalid", first_line(invalid)};
  const bool is_half =  // up to 65504
      program.is("hook", "fp16|fp16_wrapper") || program.is("precision", "half");
  if (largest(expected) > (is_half ? 1e4 : 1e6))
    return {"invalid", "values explode, and rounding errors with them"};
  std::optional<testing::TemporaryFolder> folder;
  if (program.has("reload")) folder.emplace();
  Job job(program, groups());
  if (!trace.empty()) job.trace = Trace(trace);
  job.run(folder ? folder->path() : "");
  if (!job.failures_.empty()) return judge_failures(program, job);
  const auto texts = refusals(program, /*certain=*/true);
  if (program.has("exception") && refusals(program).empty())
    return {"silence", "an exception was lost"};
  if (!texts.empty())
    return {"silence", "the documentation says \"" + texts[0] + "\", and no rank threw"};
  // Wrong as documented, and found where the ranks' factors differ enough.
  if (program.is("clip", "torch") && program.is("training", "fsdp")) return {};
  const auto differences = compare(program, job.records, expected);
  return differences.empty() ? Outcome{} : Outcome{"values", differences};
}

}  // namespace ddp::differential
