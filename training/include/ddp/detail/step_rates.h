#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/optim/optimizer.h>

namespace ddp::detail {

/// The learning rates of an optimizer's groups, as numbers, and as tensors that the kernels of a
/// captured step read: a graph keeps the tensor, whose value may change.
class DDP_API StepRates {
 public:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// Steps until end_capture() get tensors. Makes those before the capture: in it, their first
  /// value would become a part of the graph.
  void begin_capture(const Groups& groups);
  void end_capture() noexcept { is_capturing_ = false; }

  /// Writes the options' rates into the tensors where they have changed.
  void refresh(const Groups& groups);

  /// Calls `step` with the rate of a group: a number, or in a capture a tensor, shape [], float32.
  template <typename Step>
  void with(size_t group, c10::Device device, double rate, Step step) const {
    if (is_capturing_) {
      step(tensors_.at({group, device.str()}).on_device);
    } else {
      step(rate);
    }
  }

 private:
  struct Rate {
    at::Tensor on_device;
    double written;
  };

  bool is_capturing_ = false;
  std::map<std::pair<size_t, std::string>, Rate> tensors_;  // by group and device
};

}  // namespace ddp::detail
