#include "precision/parameter_readers.h"

#include <ddp/internal/check.h>
#include <torch/csrc/autograd/function.h>

namespace ddp {

void ParameterReaders::enter(Phase phase) {
  phase_ = phase;
  ++phase_changes_;
  last_change_ = Clock::now();
  changed_.notify_all();
}

// A forward pass inside a backward pass (recomputation) belongs to the training thread, even on
// autograd's thread. Between passes the optimizer may step, so another thread waits for a pause.
void ParameterReaders::check_thread(Lock& lock) {
  if (phase_ == Phase::Backward && torch::autograd::get_current_node()) return;
  const bool is_first = phase_changes_ == 0;
  if (phase_ != Phase::Backward && (is_first || is_training_thread())) return;
  DDP_CHECK(
      phase_ == Phase::Original && wait_for_pause(lock),
      "MixedPrecision: expected forward on one thread, got it on two within half a second. Give "
      "the thread that does not train a copy, model->snapshot().");
}

// Waits until half a second has passed without the begin or end of a pass. Returns false if one
// begins or ends before, or if one runs.
bool ParameterReaders::wait_for_pause(Lock& lock) {
  constexpr std::chrono::milliseconds kPause(500);
  const auto changes = phase_changes_;
  const auto is_disturbed = [this, changes] { return reads_allowed_ || phase_changes_ != changes; };
  return !changed_.wait_until(lock, last_change_ + kPause, is_disturbed) &&
         phase_ == Phase::Original;
}

void ParameterReaders::let_others_read(Lock& lock) {
  if (waiting_ == 0) return;
  reads_allowed_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return waiting_ == 0; });
  reads_allowed_ = false;
}

void ParameterReaders::read(Lock& lock, Versions versions, c10::function_ref<void()> read) {
  constexpr std::chrono::milliseconds kLook(100);
  const auto deadline = Clock::now() + std::chrono::minutes(10);
  if (is_training_thread()) return read();
  struct WaitingReader {
    explicit WaitingReader(ParameterReaders& all) : all(all) { ++all.waiting_; }
    ~WaitingReader() {
      --all.waiting_;
      all.changed_.notify_all();
    }
    WaitingReader(const WaitingReader&) = delete;
    WaitingReader& operator=(const WaitingReader&) = delete;
    ParameterReaders& all;
  } const waiting(*this);
  while (Clock::now() < deadline) {
    const auto before = versions();
    const bool is_paused = wait_for_pause(lock);
    if (!reads_allowed_ && (!is_paused || versions() != before)) {
      // A backward pass may take longer than a pause: wait for its end.
      if (phase_ != Phase::Original) changed_.wait_for(lock, kLook);
      continue;
    }
    const bool is_safe = reads_allowed_;
    read();
    if (is_safe || versions() == before) return;
  }
  DDP_CHECK(
      false,
      "MixedPrecision: expected a backward pass, or a pause of the optimizer, within ten minutes, "
      "got none. Read parameters on the thread that trains.");
}

}  // namespace ddp
