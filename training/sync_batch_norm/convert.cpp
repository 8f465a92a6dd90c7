#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/sync_batch_norm.h>

namespace ddp {
namespace {

using torch::nn::AnyModule;
using torch::nn::SequentialImpl;

bool is_batch_norm(torch::nn::Module& module) {
  return module.as<torch::nn::BatchNorm1d>() || module.as<torch::nn::BatchNorm2d>() ||
         module.as<torch::nn::BatchNorm3d>();
}

/// A place in a Sequential, and what comes there.
struct Replacement {
  SequentialImpl* net;
  size_t index;
  std::string name;
  AnyModule module;
};

template <typename Sync, typename Impl>
std::shared_ptr<Sync> synchronized(Impl& old, const ProcessGroup& group) {
  const auto& options = old.options;
  auto made = std::make_shared<Sync>(SyncBatchNormOptions(options.num_features())
                                         .eps(options.eps())
                                         .momentum(options.momentum())
                                         .affine(options.affine())
                                         .track_running_stats(options.track_running_stats())
                                         .process_group(group));
  // The same tensors: an optimizer knows parameters by them.
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

AnyModule synchronized(torch::nn::Module& module, const ProcessGroup& group) {
  if (auto* old = module.as<torch::nn::BatchNorm1d>()) {
    return AnyModule(synchronized<SyncBatchNorm1dImpl>(*old, group));
  }
  if (auto* old = module.as<torch::nn::BatchNorm2d>()) {
    return AnyModule(synchronized<SyncBatchNorm2dImpl>(*old, group));
  }
  return AnyModule(synchronized<SyncBatchNorm3dImpl>(*module.as<torch::nn::BatchNorm3d>(), group));
}

void find(
    SequentialImpl& net, const std::string& prefix, const ProcessGroup& group,
    std::vector<Replacement>& replacements, std::string& stuck) {
  size_t index = 0;
  for (const auto& child : net.named_children()) {
    const auto name = prefix + child.key();
    auto& module = *child.value();
    if (is_batch_norm(module)) {
      replacements.push_back({&net, index, child.key(), synchronized(module, group)});
    } else if (auto* inner = module.as<torch::nn::Sequential>()) {
      find(*inner, name + ".", group, replacements, stuck);
    } else {
      for (const auto& part : module.named_modules(name, /*include_self=*/false)) {
        if (is_batch_norm(*part.value())) stuck += (stuck.empty() ? "" : ", ") + part.key();
      }
    }
    ++index;
  }
}

}  // namespace

int64_t convert_sync_batchnorm(torch::nn::Sequential& net, const ProcessGroup& group) {
  std::vector<Replacement> replacements;
  std::string stuck;
  find(*net, "", group, replacements, stuck);
  DDP_CHECK_VALUE(
      stuck.empty(),
      "convert_sync_batchnorm: expected every BatchNorm to be a direct part of a Sequential, got ",
      stuck,
      " within modules that keep their own handle on it. Declare a ddp::SyncBatchNorm there.");
  for (auto& replacement : replacements) {
    replacement.net->replace_module(replacement.name, replacement.module.ptr());
    *(replacement.net->begin() + static_cast<std::ptrdiff_t>(replacement.index)) =
        std::move(replacement.module);
  }
  return static_cast<int64_t>(replacements.size());
}

}  // namespace ddp
