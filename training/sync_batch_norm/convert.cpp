#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/parameter_layout.h>
#include <ddp/sync_batch_norm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

namespace ddp {
namespace {

using torch::nn::AnyModule;
using torch::nn::SequentialImpl;

bool is_batch_norm(torch::nn::Module& module) {
  return module.as<torch::nn::BatchNorm1d>() || module.as<torch::nn::BatchNorm2d>() ||
         module.as<torch::nn::BatchNorm3d>();
}

/// A position in a Sequential, and the module that replaces the one there.
struct Replacement {
  SequentialImpl* net;
  size_t index;
  std::string name;
  AnyModule module;
};

template <typename Sync, typename Impl>
std::shared_ptr<Sync> make_synchronized(Impl& old, const GroupArg& group) {
  const auto& options = old.options;
  auto made = std::make_shared<Sync>(SyncBatchNormOptions(options.num_features())
                                         .eps(options.eps())
                                         .momentum(options.momentum())
                                         .affine(options.affine())
                                         .track_running_stats(options.track_running_stats())
                                         .process_group(group));
  // Register the same tensors: an optimizer identifies parameters by them.
  struct Registered : torch::nn::Module {
    using Module::parameters_;
  };
  auto& registered = (*made).*(&Registered::parameters_);
  if (options.affine()) {
    registered["weight"] = made->weight = old.weight;
    registered["bias"] = made->bias = old.bias;
  }
  if (options.track_running_stats()) {
    made->running_mean.set_data(old.running_mean);
    made->running_var.set_data(old.running_var);
    made->num_batches_tracked.set_data(old.num_batches_tracked);
  }
  made->train(old.is_training());
  return made;
}

AnyModule make_synchronized(torch::nn::Module& module, const GroupArg& group) {
  if (auto* old = module.as<torch::nn::BatchNorm1d>()) {
    return AnyModule(make_synchronized<SyncBatchNorm1dImpl>(*old, group));
  }
  if (auto* old = module.as<torch::nn::BatchNorm2d>()) {
    return AnyModule(make_synchronized<SyncBatchNorm2dImpl>(*old, group));
  }
  return AnyModule(
      make_synchronized<SyncBatchNorm3dImpl>(*module.as<torch::nn::BatchNorm3d>(), group));
}

/// Throws for a wrapper, which knows the layers that it was made with, and for a unit of a
/// BatchNorm, which has its parameters and buffers without its class.
void check_is_not_wrapped(const torch::nn::Module& module, const std::string& name) {
  const auto* sharded = dynamic_cast<const ShardedModule*>(&module);
  const bool is_unit = sharded != nullptr && sharded->reduces_gradients() &&
                       module.named_buffers(/*recurse=*/false).contains("running_mean");
  const bool is_wrapper = dynamic_cast<const DistributedDataParallelBase*>(&module) != nullptr;
  DDP_CHECK_VALUE(
      !is_unit && !is_wrapper,
      "convert_sync_batchnorm: expected parts that are not wrapped yet, got ",
      name.empty() ? "the module" : name,
      is_unit ? ", a unit of a normalization. Convert before FullyShardedDataParallel."
              : ", a DistributedDataParallel. Convert before it.");
}

/// The BatchNorms that were found in a module and in its parts at any depth.
struct Found {
  std::vector<Replacement> replacements;
  std::vector<std::string> members;  // which nothing can replace
};

void find_within(
    torch::nn::Module& module, const std::string& name, const GroupArg& group, Found& found) {
  check_is_not_wrapped(module, name);
  auto* net = module.as<torch::nn::Sequential>();
  size_t index = 0;
  for (const auto& child : module.named_children()) {
    const auto child_name = name.empty() ? child.key() : name + "." + child.key();
    auto& part = *child.value();
    if (!is_batch_norm(part)) {
      find_within(part, child_name, group, found);
    } else if (net == nullptr) {
      found.members.push_back(child_name);
    } else {
      found.replacements.push_back({net, index, child.key(), make_synchronized(part, group)});
    }
    ++index;
  }
}

}  // namespace

int64_t convert_sync_batchnorm(torch::nn::Module& module, const GroupArg& group) {
  Found found;
  find_within(module, "", group, found);
  if (is_batch_norm(module)) found.members.emplace_back("the module itself");
  DDP_CHECK_VALUE(
      found.members.empty(),
      "convert_sync_batchnorm: expected every BatchNorm to be an element of a Sequential, got ",
      joined_by(", ", found.members),
      ", which the code around it holds by the type BatchNorm. Declare a ddp::SyncBatchNorm "
      "there.");
  auto& replacements = found.replacements;
  for (auto& replacement : replacements) {
    replacement.net->replace_module(replacement.name, replacement.module.ptr());
    *(replacement.net->begin() + static_cast<std::ptrdiff_t>(replacement.index)) =
        std::move(replacement.module);
  }
  return static_cast<int64_t>(replacements.size());
}

}  // namespace ddp
