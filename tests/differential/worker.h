// Runs programs on ranks that are threads, in a process of its own that a finding may end.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "differential/choice.h"

namespace ddp::differential {

/// What came of a program: "" where all agreed.
struct Outcome {
  /// "values", "error", "silence" (a documented error that did not come), "late", "crash", "hang", "invalid" (the
  /// program itself is wrong: LibTorch refuses it); "" for none.
  std::string kind;
  std::string text;
};

/// Runs a program in this process, and compares it with the reference.
Outcome run_here(const Program& program);
/// The program as C++, as far as it ran: a test on threads.
std::string as_cpp(const Program& program, const std::string& folder);

/// Runs programs in a child, one after the other; starts another child after a crash, after a hang, and after
/// each hundred, because making the groups is a part of what is tested.
class Worker {
 public:
  Worker();
  ~Worker();
  Outcome run(const Program& program);

 private:
  struct Child;
  std::unique_ptr<Child> child_;
};

}  // namespace ddp::differential
