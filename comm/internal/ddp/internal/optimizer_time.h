#pragma once

#include <chrono>

namespace ddp {

/// The time that this thread has spent in optimizers that the library calls, or is: the
/// measurements of a step leave it out of the wait for data.
class OptimizerTime {
 public:
  /// While it exists, an optimizer steps. Of nested ones the outermost counts.
  class Scope {
   public:
    Scope() : begin_(Clock::now()) { ++nested(); }
    ~Scope() {
      if (--nested() == 0)
        total() += std::chrono::duration<double, std::milli>(Clock::now() - begin_).count();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    using Clock = std::chrono::steady_clock;

    Clock::time_point begin_;
  };

  /// Since the thread began, in ms of the host.
  static double total_ms() { return total(); }

 private:
  static int& nested() {
    thread_local int nested = 0;
    return nested;
  }
  static double& total() {
    thread_local double ms = 0;
    return ms;
  }
};

}  // namespace ddp
