#include "averaged_model/batch_norms.h"

#include <functional>
#include <string>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/parameter_layout.h>
#include <ddp/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>

namespace ddp {
namespace {

/// Calls `use` with the module as its class, where that is a batch normalization.
template <typename Use>
bool as_batch_norm(torch::nn::Module& module, const Use& use) {
  const auto use_as = [&](auto* norm) {
    if (norm != nullptr) use(*norm);
    return norm != nullptr;
  };
  return use_as(dynamic_cast<torch::nn::BatchNorm1dImpl*>(&module)) ||
         use_as(dynamic_cast<torch::nn::BatchNorm2dImpl*>(&module)) ||
         use_as(dynamic_cast<torch::nn::BatchNorm3dImpl*>(&module)) ||
         use_as(dynamic_cast<SyncBatchNormImpl*>(&module));
}

void check_is_no_unit(const torch::nn::Module& module, const std::string& name) {
  const bool is_unit = dynamic_cast<const ShardedModule*>(&module) != nullptr &&
                       module.named_buffers(/*recurse=*/false).contains("running_mean");
  DDP_CHECK_VALUE(
      !is_unit, "AveragedModel::update_bn: expected batch normalizations inside of units, got ",
      name.empty() ? "the model" : name,
      ", a FullyShardedDataParallel of one alone. Make the module around it the unit.");
}

}  // namespace

AveragingBatchNorms::AveragingBatchNorms(torch::nn::Module& module)
    : module_(module), was_training_(module.is_training()) {
  std::vector<std::function<void()>> resets;
  const auto take = [&](torch::nn::Module& part) {
    as_batch_norm(part, [&](auto& norm) {
      auto& momentum = norm.options.momentum();
      const bool has_statistics = norm.options.track_running_stats();
      norms_.push_back({&momentum, momentum, {}, {}, {}});
      if (!has_statistics) return;
      norms_.back().mean = norm.running_mean;
      norms_.back().var = norm.running_var;
      norms_.back().batches = norm.num_batches_tracked;
      resets.emplace_back([&norm] { norm.reset_running_stats(); });
    });
  };
  take(module);
  check_is_no_unit(module, "");
  for (const auto& part : module.named_modules("", /*include_self=*/false)) {
    check_is_no_unit(*part.value(), part.key());
    take(*part.value());
    modes_.emplace_back(part.value(), part.value()->is_training());
  }
  DDP_CHECK_VALUE(
      !norms_.empty(),
      "AveragedModel::update_bn: expected a model with BatchNorm1d, BatchNorm2d, BatchNorm3d or "
      "SyncBatchNorm, got none. Leave the call out.");
  for (const auto& reset : resets) reset();
  for (const auto& norm : norms_) norm.momentum->reset();
  module_.train();
}

AveragingBatchNorms::~AveragingBatchNorms() {
  for (const auto& norm : norms_) *norm.momentum = norm.its_momentum;
  module_.train(was_training_);
  for (const auto& [part, was_training] : modes_) part->train(was_training);
}

void AveragingBatchNorms::combine(const ProcessGroup& group) const {
  if (group->getSize() == 1) return;
  // Means of the ranks' means, with the numbers of their batches as weights.
  std::vector<at::Tensor> sums;
  for (const auto& norm : norms_) {
    if (!norm.mean.defined()) continue;
    const auto device = sums.empty() ? norm.mean.device() : sums.front().device();
    const auto batches = norm.batches.to(device, at::kDouble).reshape({1});
    for (const auto& mean : {norm.mean, norm.var}) {
      sums.push_back(mean.to(device, at::kDouble) * batches);
    }
    sums.push_back(batches);
  }
  if (sums.empty()) return;
  auto all = at::cat(sums);
  all_reduce(all, c10d::ReduceOp::SUM, group);
  int64_t begin = 0;
  for (const auto& norm : norms_) {
    if (!norm.mean.defined()) continue;
    const auto size = norm.mean.numel();
    const auto total = all.narrow(0, begin + 2 * size, 1);
    if (total.item<double>() > 0) {
      norm.mean.copy_(all.narrow(0, begin, size) / total);
      norm.var.copy_(all.narrow(0, begin + size, size) / total);
      norm.batches.copy_(total.squeeze(0));
    }
    begin += 2 * size + 1;
  }
}

void AveragingBatchNorms::check_had_batches() const {
  bool has_statistics = false;
  for (const auto& norm : norms_) {
    if (!norm.batches.defined()) continue;
    if (norm.batches.item<int64_t>() > 0) return;
    has_statistics = true;
  }
  DDP_CHECK_VALUE(
      !has_statistics,
      "AveragedModel::update_bn: expected a loader with batches that forward passes to the model, "
      "got none that reached a batch normalization. Pass a loader that begins anew, and call the "
      "model in forward.");
}

}  // namespace ddp
