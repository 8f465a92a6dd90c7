// Where the threads of all ranks wait for each other, not through a group.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

namespace ddp::testing {

class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}

  /// \throws std::runtime_error  if a rank does not come.
  void come() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++here_ == ranks_) {
      here_ = 0;
      ++round_;
      all_.notify_all();
      return;
    }
    const auto is_over = [&] { return round_ != round; };
    if (!all_.wait_for(lock, std::chrono::seconds(40), is_over)) {
      throw std::runtime_error("a rank does not come");
    }
  }

 private:
  const int ranks_;
  std::mutex mutex_;
  std::condition_variable all_;
  int here_ = 0, round_ = 0;
};

}  // namespace ddp::testing
