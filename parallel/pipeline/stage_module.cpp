#include <ddp/detail/stage_module.h>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

namespace ddp::detail {
namespace {

/// Calls `use` with the module as the wrapper that it is, if it is one.
template <typename Use>
void if_wrapper(torch::nn::Module& module, const Use& use) {
  if (auto* replicas = dynamic_cast<DistributedDataParallelBase*>(&module)) return use(*replicas);
  if (auto* shards = dynamic_cast<FullyShardedBase*>(&module)) return use(*shards);
}

}  // namespace

StageUse::StageUse(torch::nn::Module& module) : sharded_(dynamic_cast<FullyShardedBase*>(&module)) {
  if_wrapper(module, [&](auto& wrapper) { no_sync_.reset(new NoSyncGuard(wrapper.no_sync())); });
  if (sharded_) sharded_->hold_units();
}

StageUse::~StageUse() {
  if (sharded_) sharded_->drop_units();
}

void StageModule::sync_in_backward(const StageTensors& outputs) const {
  if_wrapper(*module, [&](auto& wrapper) { wrapper.sync_in_backward(outputs); });
}

bool StageModule::reduces() const {
  if (dynamic_cast<const DistributedDataParallelBase*>(module.get())) return true;
  if (!dynamic_cast<const FullyShardedBase*>(module.get())) return false;
  const auto parameters = module->parameters();
  return any_of(parameters, [](const at::Tensor& parameter) { return parameter.requires_grad(); });
}

bool StageModule::may_reduce_each() const {
  const auto* replicas = dynamic_cast<const DistributedDataParallelBase*>(module.get());
  return replicas == nullptr || replicas->reduction() == Reduction::Mean;
}

void check_stage_result(bool is_understood, const std::string& type) {
  DDP_CHECK_VALUE(
      is_understood,
      "PipelineStage: expected a result of forward whose tensors can be found, got a ", type,
      ". Declare visit_tensors() for it (ddp/output_tensors.h), or return the tensors themselves.");
}

}  // namespace ddp::detail
