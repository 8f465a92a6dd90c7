// Simulates graph capture where there is no GPU, in programs that have pretended_capture.cpp.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>

namespace ddp::testing {

/// The result of is_capturing().
inline std::atomic<bool> pretends_to_capture{false};

/// A barrier of ranks without their group, which a test may have aborted.
class RankBarrier {
 public:
  explicit RankBarrier(int size) : size_(size) {}

  /// Waits for all ranks; the last one runs `act` before all continue.
  void wait_and_run(const std::function<void()>& act) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++arrived_ < size_) {
      all_arrived_.wait(lock, [&] { return round_ != round; });
      return;
    }
    act();
    arrived_ = 0;
    ++round_;
    all_arrived_.notify_all();
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable all_arrived_;
  int arrived_ = 0;
  int round_ = 0;
};

/// Makes all ranks capture during its lifetime on them.
class Capture {
 public:
  explicit Capture(RankBarrier& barrier) : barrier_(barrier) {
    barrier_.wait_and_run([] { pretends_to_capture = true; });
  }
  ~Capture() {
    barrier_.wait_and_run([] { pretends_to_capture = false; });
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  RankBarrier& barrier_;
};

}  // namespace ddp::testing
