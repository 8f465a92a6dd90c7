#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/parameter_layout.h>
#include <ddp/sync_batch_norm.h>

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
std::shared_ptr<Sync> make_synchronized(Impl& old, const ProcessGroup& group) {
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

AnyModule make_synchronized(torch::nn::Module& module, const ProcessGroup& group) {
  if (auto* old = module.as<torch::nn::BatchNorm1d>()) {
    return AnyModule(make_synchronized<SyncBatchNorm1dImpl>(*old, group));
  }
  if (auto* old = module.as<torch::nn::BatchNorm2d>()) {
    return AnyModule(make_synchronized<SyncBatchNorm2dImpl>(*old, group));
  }
  return AnyModule(
      make_synchronized<SyncBatchNorm3dImpl>(*module.as<torch::nn::BatchNorm3d>(), group));
}

/// Throws for a unit of a BatchNorm, which has its parameters and buffers without its class.
void check_is_no_unit(const torch::nn::Module& module, const std::string& name) {
  const auto* sharded = dynamic_cast<const ShardedModule*>(&module);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  DDP_CHECK_VALUE(
      sharded == nullptr || !sharded->reduces_gradients() || !buffers.contains("running_mean"),
      "convert_sync_batchnorm: expected parts that are not wrapped yet, got ", name,
      ", a unit of a normalization. Convert before FullyShardedDataParallel.");
}

void find_replacements(
    SequentialImpl& net, const std::string& prefix, const ProcessGroup& group,
    std::vector<Replacement>& replacements, std::string& unreachable) {
  size_t index = 0;
  for (const auto& child : net.named_children()) {
    const auto name = prefix + child.key();
    auto& module = *child.value();
    if (is_batch_norm(module)) {
      replacements.push_back({&net, index, child.key(), make_synchronized(module, group)});
    } else if (auto* inner = module.as<torch::nn::Sequential>()) {
      find_replacements(*inner, name + ".", group, replacements, unreachable);
    } else {
      check_is_no_unit(module, name);
      for (const auto& part : module.named_modules(name, /*include_self=*/false)) {
        if (is_batch_norm(*part.value()))
          unreachable += (unreachable.empty() ? "" : ", ") + part.key();
      }
    }
    ++index;
  }
}

}  // namespace

int64_t convert_sync_batchnorm(torch::nn::Sequential& net, const ProcessGroup& group) {
  std::vector<Replacement> replacements;
  std::string unreachable;
  find_replacements(*net, "", group, replacements, unreachable);
  DDP_CHECK_VALUE(
      unreachable.empty(),
      "convert_sync_batchnorm: expected every BatchNorm to be a direct part of a Sequential, got ",
      unreachable,
      " within modules that keep their own handle on it. Declare a ddp::SyncBatchNorm there.");
  for (auto& replacement : replacements) {
    replacement.net->replace_module(replacement.name, replacement.module.ptr());
    *(replacement.net->begin() + static_cast<std::ptrdiff_t>(replacement.index)) =
        std::move(replacement.module);
  }
  return static_cast<int64_t>(replacements.size());
}

}  // namespace ddp
