// Runs programs on ranks that are threads, in a process of its own that a finding may end.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "differential/choice.h"

namespace ddp::differential {

/// What came of a program: "" where all agreed.
struct Outcome {
  /// "values", "error", "silence" (a documented error that did not come), "late", "crash", "hang",
  /// "lists" (a pretended rank's calls are not the real rank's), "order" (of right calls, or a
  /// mistake in them that is not found), "invalid" (the program itself is wrong: LibTorch refuses
  /// it); "" for none.
  std::string kind;
  std::string text;
};

/// Runs a program in this process, and compares it with the reference. `trace`: a file for what
/// rank 0 runs.
Outcome run_here(const Program& program, const std::string& trace = "");
/// By name, the sums that the printed program compares: of the reference's parameters at the end.
std::map<std::string, double> reference_sums(const Program& program);
/// The C++ of what a program ran, by the lines of its trace: a test on threads.
std::string as_cpp(
    const Program& program, const std::vector<std::string>& trace, const Outcome& outcome);

/// Runs programs in a child, one after the other; starts another child after a crash, after a hang,
/// and after each hundred, because making the groups is a part of what is tested. A program whose
/// calls are listed runs in processes of its own, too.
class Worker {
 public:
  Worker();
  ~Worker();
  Outcome run(const Program& program, const std::string& trace = "");
  /// Runs a program in a child of its own, and returns it as C++, as far as it came.
  std::string print(const Program& program);

 private:
  struct Child;
  Outcome run_on_threads(const Program& program, const std::string& trace);

  std::unique_ptr<Child> child_;
};

}  // namespace ddp::differential
