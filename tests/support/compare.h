// Compares lists of tensors, and copies tensors that training changes.
#pragma once

#include <algorithm>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

namespace ddp::testing {

/// Bit by bit; undefined tensors equal each other.
inline bool all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  });
}

inline bool all_close(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b, double rtol, double atol) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& x, const auto& y) {
    return at::allclose(x, y, rtol, atol);
  });
}

/// The largest difference between elements; 1e300 for undefined tensors, other sizes and NaN.
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  constexpr double kMost = 1e300;
  if (!a.defined() || !b.defined() || a.sizes() != b.sizes()) return kMost;
  if (a.numel() == 0) return 0;
  const auto largest = (a.detach() - b.detach()).abs().max().to(at::kDouble).item<double>();
  return largest <= kMost ? largest : kMost;
}

/// The same over all tensors; 1e300 for lists of other lengths.
inline double largest_difference(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = a.size() == b.size() ? 0 : 1e300;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, difference(a[i], b[i]));
  }
  return largest;
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

/// A copy of all elements, tensor by tensor.
inline at::Tensor flattened(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const auto& tensor : tensors) flat.push_back(tensor.detach().flatten());
  return at::cat(flat);
}

/// Copies of the parameters, and after them of the buffers.
inline std::vector<at::Tensor> state_of(const torch::nn::Module& module) {
  auto state = module.parameters();
  for (const auto& buffer : module.buffers()) state.push_back(buffer);
  return copies_of(state);
}

/// Copies; zeros for parameters without.
inline std::vector<at::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& p : module.parameters()) {
    gradients.push_back(p.grad().defined() ? p.grad() : at::zeros_like(p));
  }
  return copies_of(gradients);
}

}  // namespace ddp::testing
