// Steps that are captured for a graph, where there is no GPU: the library is told that they are.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include <ddp/internal/stream_capture.h>

namespace ddp::testing {

/// Ranks that meet without their group, which a test may have aborted.
class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}

  /// Lets the last rank that comes `act`, and then all go on.
  void meet(const std::function<void()>& act) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++here_ < size_) {
      all_here_.wait(lock, [&] { return round_ != round; });
      return;
    }
    act();
    here_ = 0;
    ++round_;
    all_here_.notify_all();
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  int here_ = 0;
  int round_ = 0;
};

/// As if all ranks captured, for as long as it lives on them.
class Capture {
 public:
  explicit Capture(Meeting& meeting) : meeting_(meeting) {
    meeting_.meet([] { pretends_to_capture = true; });
  }
  ~Capture() {
    meeting_.meet([] { pretends_to_capture = false; });
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  Meeting& meeting_;
};

}  // namespace ddp::testing
