#include "optim/fused_batch.h"

#include <algorithm>
#include <map>
#include <tuple>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

// Whether the elements of both have the same order in memory, without gaps.
bool lie_alike(const at::Tensor& tensor, const at::Tensor& parameter) {
  for (int64_t d = 0; d < parameter.dim(); ++d) {
    if (parameter.size(d) > 1 && tensor.stride(d) != parameter.stride(d)) return false;
  }
  return true;
}

bool has_kernel(const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// The kernels step tensors of other kinds wrongly, or not at all, without an error.
void check_parameter(const std::string& subject, const at::Tensor& p, size_t index, size_t group) {
  const auto& gradient = p.grad();
  const auto name = [&] { return ddp::str(" of parameter ", index, " in group ", group); };
  DDP_CHECK_VALUE(
      !gradient.is_sparse() && !gradient.is_sparse_csr(), subject,
      ": expected dense gradients, got a sparse one", name(),
      ". Take torch::optim::SGD or torch::optim::Adagrad, which step on sparse gradients.");
  DDP_CHECK_VALUE(
      has_kernel(p), subject, ": expected parameters of float, double, half or bfloat16, got ",
      p.scalar_type(), name(), ". Take LibTorch's optimizer of this name for it.");
  DDP_CHECK_VALUE(
      p.is_cpu() || p.is_cuda(), subject, ": expected parameters on CPUs or CUDA devices, got the ",
      "device ", p.device(), name(), ". Take LibTorch's optimizer of this name for it.");
  DDP_CHECK_VALUE(
      gradient.sizes() == p.sizes() && gradient.scalar_type() == p.scalar_type() &&
          gradient.device() == p.device(),
      subject, ": expected a gradient of the parameter's shape, dtype and device, ", p.sizes(), " ",
      p.scalar_type(), " on ", p.device(), ", got ", gradient.sizes(), " ", gradient.scalar_type(),
      " on ", gradient.device(), name(), ". Convert the gradient first.");
  DDP_CHECK_VALUE(
      p.is_non_overlapping_and_dense(), subject,
      ": expected parameters whose memory has no gaps, got strides ", p.strides(), " for sizes ",
      p.sizes(), name(), ". Make the parameter contiguous, or take LibTorch's optimizer for it.");
}

std::optional<at::Tensor> on_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return std::nullopt;
  return tensor.to(device, /*non_blocking=*/true);
}

}  // namespace

FusedBatch::FusedBatch(std::string subject, const StepScaling& scaling, c10::Device device)
    : subject_(std::move(subject)),
      device_(device),
      grad_scale_(on_device(scaling.grad_scale, device)),
      found_inf_(on_device(scaling.found_inf, device)) {}

void FusedBatch::add(const at::Tensor& parameter) {
  parameters_.push_back(parameter);
  const auto& gradient = parameter.grad();
  if (lie_alike(gradient, parameter)) {
    gradients_.push_back(gradient);
    return;
  }
  gradients_.push_back(at::empty_like(parameter).copy_(gradient));
  copies_.emplace_back(gradient, gradients_.back());
}

const at::Tensor& FusedBatch::like_parameter(
    at::Tensor& state, const at::Tensor& parameter, double value) const {
  if (!state.defined()) return state = at::full_like(parameter, value);
  DDP_CHECK_VALUE(
      state.sizes() == parameter.sizes() && state.scalar_type() == parameter.scalar_type() &&
          state.device() == parameter.device(),
      subject_, ": expected a state of the parameter's shape, dtype and device, ",
      parameter.sizes(), " ", parameter.scalar_type(), " on ", parameter.device(), ", got ",
      state.sizes(), " ", state.scalar_type(), " on ", state.device(),
      ". Erase the state of a parameter that has changed, or make the optimizer anew.");
  if (!lie_alike(state, parameter)) state = at::empty_like(parameter).copy_(state);
  return state;
}

void FusedBatch::finish() {
  if (grad_scale_) {
    for (auto& [gradient, copy] : copies_) gradient.copy_(copy);
  }
  for (const auto& p : parameters_) p.unsafeGetTensorImpl()->bump_version();
}

std::vector<BatchesOfGroup> fused_batches(
    const std::string& subject, const torch::optim::Optimizer& optimizer,
    const StepScaling& scaling) {
  const auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) check_parameter(subject, parameters[i], i, g);
    }
  }
  std::vector<BatchesOfGroup> batches(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>, size_t> batch_of;
    for (const auto& p : groups[g].params()) {
      if (!p.grad().defined()) continue;
      const auto device = p.device();
      const auto [batch, is_new] =
          batch_of.try_emplace({device.type(), device.index(), p.scalar_type()}, batches[g].size());
      if (is_new) batches[g].emplace_back(subject, scaling, device);
      batches[g][batch->second].add(p);
    }
  }
  return batches;
}

}  // namespace ddp
