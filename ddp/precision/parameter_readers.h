#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace ddp {

/// Finds moments at which other threads than the training one may read parameters: when a backward
/// pass begins, and when nothing has been trained for half a second.
///
/// Thread safety: the owner's mutex guards all members; each function is called while it is held.
class ParameterReaders {
 public:
  /// The values that parameters hold: the originals, or the casts of a pass.
  enum class Phase { Original, Forward, Backward };
  using Lock = std::unique_lock<std::mutex>;
  /// The parameters' versions, which an optimizer's step raises.
  using Versions = c10::function_ref<std::vector<int64_t>()>;

  Phase phase() const { return phase_; }
  void enter(Phase phase);

  /// Whether this thread ran the last forward pass, or constructed this object, if none has run.
  bool is_training_thread() const { return training_thread_ == std::this_thread::get_id(); }
  /// A forward pass begins on this thread. Where another thread ran the last one, waits for a
  /// pause.
  ///
  /// \throws c10::Error  a pass of another thread runs, or begins during that wait.
  void check_thread(Lock& lock);
  void set_training_thread() { training_thread_ = std::this_thread::get_id(); }

  /// Waits until every waiting reader has read. Call it at the begin of a backward pass: there no
  /// optimizer steps, and no forward pass changes a buffer.
  void let_others_read(Lock& lock);

  /// As LowPrecisionParameters::read().
  void read(Lock& lock, Versions versions, c10::function_ref<void()> read);

 private:
  using Clock = std::chrono::steady_clock;

  bool wait_for_pause(Lock& lock);

  Phase phase_ = Phase::Original;
  uint64_t phase_changes_ = 0;
  Clock::time_point last_change_{};
  std::thread::id training_thread_ = std::this_thread::get_id();
  int waiting_ = 0;             // threads in read()
  bool reads_allowed_ = false;  // the training thread waits for the readers
  std::condition_variable changed_;
};

}  // namespace ddp
