#include "wrapped_model.h"

namespace transformer {
namespace {

std::variant<WrappedModel::Replicated, WrappedModel::Sharded> wrap(
    const Options& options, const LanguageModel& net) {
  const auto& group = net->groups.data;
  if (options.fsdp) {
    return WrappedModel::Sharded(net, ddp::FullyShardedOptions().process_group(group));
  }
  return WrappedModel::Replicated(
      net,
      ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true).process_group(group));
}

}  // namespace

WrappedModel::WrappedModel(const Options& options, const LanguageModel& net)
    : wrapper_(wrap(options, net)) {}

at::Tensor WrappedModel::forward(const at::Tensor& characters) {
  return std::visit([&](auto& wrapper) { return wrapper->forward(characters); }, wrapper_);
}

LanguageModel& WrappedModel::net() {
  return std::visit([](auto& wrapper) -> LanguageModel& { return wrapper->module(); }, wrapper_);
}

torch::nn::Module& WrappedModel::module() {
  return std::visit([](auto& wrapper) -> torch::nn::Module& { return *wrapper; }, wrapper_);
}

}  // namespace transformer
