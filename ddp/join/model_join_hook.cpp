#include "join/model_join_hook.h"

#include "zero/optimizer_state.h"

namespace ddp {

void ModelJoinHook::main_hook() {
  const auto terms = model_.terms().of_joined_pass();
  model_.compare_in_first_pass();
  model_.reducer().join_backward(terms);
}

void ModelJoinHook::post_hook(bool is_last_joiner) {
  const auto round =
      all_reduce_status({is_last_joiner}, model_.group(), model_.device(), model_.monitor());
  model_.broadcast_model(round.last_active(), model_.shares_buffers());
  for (auto* optimizer : options_.optimizers()) {
    broadcast_optimizer(*optimizer, round.last_active(), model_.group(), model_.monitor());
  }
  const bool uneven = round.active() < round.size();
  if (uneven && options_.optimizers().empty() && !model_.steps_without_input()) {
    TORCH_WARN_ONCE(
        "join: some ranks had less input than others, so their optimizers took fewer steps. The "
        "models are equal now; momentum, moments and step counts of optimizers are not, and the "
        "models will drift apart. Pass JoinOptions().optimizers({&optimizer}), or use "
        "step_in_backward().");
  }
}

}  // namespace ddp
