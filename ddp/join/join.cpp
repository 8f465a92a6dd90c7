#include <ddp/join.h>

#include <algorithm>
#include <memory>

#include <ddp/internal/check.h>
#include <ddp/zero.h>
#include <torch/nn/module.h>

#include "join/join_context.h"

namespace ddp {
namespace {

const std::vector<Joinable*>& checked(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body) {
  DDP_CHECK_VALUE(
      !joinables.empty(), "join: expected at least one Joinable, got none. Pass the model.");
  DDP_CHECK_VALUE(body, "join: expected a body to run, got an empty function.");
  for (const auto* joinable : joinables) {
    DDP_CHECK_VALUE(joinable, "join: expected Joinables, got a null pointer.");
    DDP_CHECK_VALUE(
        joinable->join_process_group() == joinables.front()->join_process_group(),
        "join: expected all Joinables to use one process group, got different ones. Join those of "
        "each group on their own.");
    DDP_CHECK_VALUE(
        std::count(joinables.begin(), joinables.end(), joinable) == 1,
        "join: expected each Joinable once, got one twice. List it once.");
  }
  return joinables;
}

void check_optimizers(const std::vector<torch::optim::Optimizer*>& optimizers) {
  for (auto* optimizer : optimizers) {
    DDP_CHECK_VALUE(
        optimizer,
        "JoinOptions::optimizers: expected optimizers, got a null pointer. Leave it out.");
    DDP_CHECK_VALUE(
        dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer) == nullptr,
        "JoinOptions::optimizers: expected optimizers whose whole state each rank has, got a "
        "ZeroRedundancyOptimizer, which ranks without input step with the others. Leave it out; "
        "without overlap it is one of the objects: ddp::join({model.get(), &optimizer}, body).");
  }
}

/// Handles of the modules among them, where they are held by any.
std::vector<std::shared_ptr<torch::nn::Module>> handles_of_modules(
    const std::vector<Joinable*>& joinables) {
  std::vector<std::shared_ptr<torch::nn::Module>> handles;
  for (auto* joinable : joinables) {
    auto* module = dynamic_cast<torch::nn::Module*>(joinable);
    if (module) handles.push_back(module->weak_from_this().lock());
  }
  return handles;
}

}  // namespace

void notify_join(Joinable& joinable) {
  if (auto* context = joinable.join_context_) {
    context->begin_round(joinable, JoinPlace::Event::Iteration, {});
  }
}

void join(
    const std::vector<Joinable*>& joinables, const std::function<void()>& body,
    const JoinOptions& options) {
  checked(joinables, body);
  check_optimizers(options.optimizers());
  if (!options.enable()) return body();
  const auto alive = handles_of_modules(joinables);  // a body may drop the caller's
  JoinContext context(joinables, options);
  std::vector<std::unique_ptr<JoinHook>> hooks;
  for (auto* joinable : joinables) hooks.push_back(joinable->join_hook(options));
  context.run([&] {
    body();
    const bool is_last_joiner = context.shadow(hooks);
    for (const auto& hook : hooks) hook->post_hook(is_last_joiner);
  });
}

}  // namespace ddp
