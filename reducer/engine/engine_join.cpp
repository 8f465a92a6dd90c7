// A reduced pass of the other ranks, which this rank joins without a backward pass of its own.
#include <ATen/core/grad_mode.h>

#include "engine/engine.h"

namespace ddp {

void Reducer::Engine::join_backward(const PassTerms& terms) {
  monitor_->check();
  const at::NoGradGuard no_grad;
  if (schedule_.rebuild_is_due()) rebuild_buckets();
  begin_pass(pass_->number());
  if (!terms.adds) averaged_.drop();
  pass_->joined = true;
  pass_->forwards = 1;
  pass_->terms = terms;
  phase_ = Phase::Reducing;
  launch_rest();
  finish_pass();
}

}  // namespace ddp
