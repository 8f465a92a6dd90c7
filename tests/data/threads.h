// Helpers for tests of threads: waiting with a limit, and counting.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <thread>

namespace ddp::testing {

/// A number that threads raise and wait for. A test that waits too long fails instead of hanging.
class Count {
 public:
  size_t raise() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
    return ++value_;
  }
  size_t value() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return value_;
  }
  /// \return whether the number reached `value` within 20 s.
  bool wait_for(size_t value) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return value_ >= value; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  size_t value_ = 0;
};

/// An object whose number of instances shows what is still kept; copies count too.
class Counted {
 public:
  Counted() { ++alive(); }
  Counted(const Counted&) { ++alive(); }
  Counted(Counted&&) noexcept { ++alive(); }
  Counted& operator=(const Counted&) = default;
  Counted& operator=(Counted&&) = default;
  ~Counted() { --alive(); }

  static std::atomic<int>& alive() {
    static std::atomic<int> count{0};
    return count;
  }
};

/// The number of threads of this process.
inline ptrdiff_t thread_count() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

/// \return whether the process had at most `count` threads within 20 s: a joined thread stays
///         listed for a moment.
inline bool threads_left(ptrdiff_t count) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (thread_count() > count) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

}  // namespace ddp::testing
