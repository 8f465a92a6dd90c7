// Modules that are built under a DeferredInit guard, and what they are compared by.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ddp/ddp.h>

namespace ddp::testing {

using Module = std::shared_ptr<torch::nn::Module>;
using Build = std::function<Module()>;

template <typename Net>
Module of(Net net) {
  return net.ptr();
}

/// Registers what a function makes.
struct Made : torch::nn::Module {
  explicit Made(const std::function<void(Made&)>& make) { make(*this); }
};
inline Build made(const std::function<void(Made&)>& make) {
  return [make] { return std::make_shared<Made>(make); };
}

inline std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  auto tensors = module.parameters();
  const auto buffers = module.buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

inline at::Tensor generator_state() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

inline bool equal_modules(const torch::nn::Module& one, const torch::nn::Module& other) {
  const auto a = tensors_of(one), b = tensors_of(other);
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].dtype() != b[i].dtype() || a[i].strides() != b[i].strides()) return false;
    if (a[i].requires_grad() != b[i].requires_grad()) return false;
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

inline bool all_deferred(const torch::nn::Module& module) {
  for (const auto& tensor : tensors_of(module)) {
    if (tensor.numel() > 0 && !ddp::is_deferred(tensor)) return false;
  }
  return true;
}

inline Module build_deferred(const Build& build) {
  const ddp::DeferredInit guard;
  return build();
}

}  // namespace ddp::testing
