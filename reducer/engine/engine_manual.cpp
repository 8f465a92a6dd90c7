// Passes that the program itself ends, so that its work after backward overlaps the reduction.
#include <exception>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>

#include "engine/engine.h"

namespace ddp {

void Reducer::Engine::require_manual_finalization(bool required) {
  const auto phase = phase_.load();
  DDP_CHECK(
      phase == Phase::Idle || phase == Phase::Local || phase == Phase::Done,
      "require_manual_backward_finalization: expected to be set between two steps, got a call "
      "between a forward pass and the end of its averaged backward pass on ",
      monitor_->rank_text(), ". Set it before forward, or after finalize_backward().");
  finalizes_by_hand_ = required;
}

bool Reducer::Engine::should_finalize_after_backward() const {
  return finalizes_by_hand_ &&
         (!schedule_.is_final() || usage_->is_counting() || observers_.tuner != nullptr);
}

void Reducer::Engine::finalize_backward() {
  DDP_CHECK(
      finalizes_by_hand_,
      "finalize_backward: expected require_manual_backward_finalization(true), got a model whose "
      "backward passes end by themselves on ",
      monitor_->rank_text(), ". Set it before the forward pass.");
  const auto phase = phase_.load();
  DDP_CHECK(
      phase == Phase::Reducing || phase == Phase::Sent,
      "finalize_backward: expected an averaged backward pass that is not finalized, got none on ",
      monitor_->rank_text(), ". Call it once after each backward pass outside no_sync().");
  const at::NoGradGuard no_grad;
  if (phase == Phase::Sent) {
    phase_ = Phase::Reducing;
  } else {
    DDP_CHECK(
        pass_->is_complete() && !should_finalize_after_backward() && !pass_->waits_for_autograd,
        "finalize_backward: expected the gradients of all parameters, got a call within the "
        "backward pass before they are there, or where should_finalize_after_backward() is true, "
        "on ",
        monitor_->rank_text(), ". Call it after backward() has returned.");
    send_rest();
  }
  try {
    finish_pass();
  } catch (...) {
    on_backward_failed(pass_->number(), std::current_exception());  // if the pass has not ended
    throw;
  }
}

void Reducer::Engine::check_finalized() const {
  DDP_CHECK(
      !awaits_finalization(),
      "DistributedDataParallel: expected finalize_backward() before the next pass, got a forward "
      "or backward pass while gradients are on their way on ",
      monitor_->rank_text(), ". Call it once after each averaged backward pass.");
}

}  // namespace ddp
