#include <ddp/sync_batch_norm.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/detail/recompute.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/join.h>

#include "fused.h"
#include "normalize.h"

namespace ddp {
namespace {

torch::nn::BatchNormOptions checked(const SyncBatchNormOptions& options) {
  DDP_CHECK_VALUE(
      options.num_features() >= 1, "SyncBatchNorm: expected num_features >= 1, got ",
      options.num_features(), ". It is the input's second size.");
  DDP_CHECK_VALUE(
      options.eps() > 0, "SyncBatchNorm: expected eps > 0, got ", options.eps(),
      ". 1e-5 is usual.");
  const auto& momentum = options.momentum();
  DDP_CHECK_VALUE(
      !momentum || (*momentum >= 0 && *momentum <= 1),
      "SyncBatchNorm: expected 0 <= momentum <= 1, got ", momentum.value_or(0),
      ". 0.1 is usual, nullopt averages over all batches.");
  return torch::nn::BatchNormOptions(options.num_features())
      .eps(options.eps())
      .momentum(options.momentum())
      .affine(options.affine())
      .track_running_stats(options.track_running_stats());
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const SyncBatchNormOptions& options)
    : NormImplBase(checked(options)), group_(options.process_group().given()) {}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) { check_dimensions(input, 2, 5); }

void SyncBatchNormImpl::check_dimensions(
    const at::Tensor& input, int64_t least, int64_t most) const {
  DDP_CHECK(
      input.dim() >= least && input.dim() <= most, "SyncBatchNorm: expected an input of ", least,
      least == most ? "" : ddp::str(" to ", most), " dimensions, got ", input.sizes(),
      ". The first is the batch, the second are the channels.");
  DDP_CHECK(
      input.size(1) == options.num_features(), "SyncBatchNorm: expected ", options.num_features(),
      " channels in the second dimension, got ", input.sizes(), ".");
}

double SyncBatchNormImpl::next_momentum() {
  if (!is_training() || !options.track_running_stats()) return options.momentum().value_or(0);
  detail::check_statistics_are_named({running_mean});
  num_batches_tracked += 1;
  return options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
}

ProcessGroup SyncBatchNormImpl::statistics_group() const {
  if (group_) return group_;
  return is_initialized() ? default_group() : nullptr;
}

ProcessGroup SyncBatchNormImpl::group_in_use() const {
  if (!is_training()) return nullptr;
  const auto group = statistics_group();
  return group && get_world_size(group) > 1 ? group : nullptr;
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  const auto momentum = next_momentum();
  const auto group = group_in_use();
  if (!group) {
    const bool by_batch = is_training() || !options.track_running_stats();
    return torch::nn::functional::detail::batch_norm(
        input, running_mean, running_var, weight, bias, by_batch, momentum, options.eps());
  }
  DDP_CHECK(
      !detail::in_uneven_join(),
      "SyncBatchNorm: expected a join that ends as soon as one rank has no input, got one that "
      "goes on: a rank without input has no batch to normalize with. Pass "
      "JoinOptions().throw_on_early_termination(true).");
  if (has_fused_operators(input)) {
    return normalize_fused(
        input, {weight, bias, running_mean, running_var}, momentum, options.eps(), group);
  }
  const auto statistics = gather_statistics(input, group);
  if (options.track_running_stats()) {
    const c10::NoGradGuard no_grad;
    const auto& count = statistics.count;
    running_mean.mul_(1 - momentum).add_(statistics.mean.mul(momentum));
    running_var.mul_(1 - momentum).add_(statistics.var.mul(count / (count - 1)).mul_(momentum));
  }
  return normalize_with(input, weight, bias, statistics, options.eps(), group);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "ddp::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ')';
}

}  // namespace ddp
