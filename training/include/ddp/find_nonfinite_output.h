#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <ddp/output_tensors.h>
#include <torch/nn/module.h>

namespace ddp {

namespace detail {

DDP_API std::string find_nonfinite_output(
    const torch::nn::Module& module, const std::function<std::vector<at::Tensor>()>& forward);

}  // namespace detail

/// Runs `forward` once, and names the operator that made its result infinite or NaN, for a step in
/// which `find_nonfinite(true)` has found a gradient that is not finite, or whose loss is not.
/// ```
/// std::cout << ddp::find_nonfinite_output(*net, [&] { return loss(net->forward(x), y); });
/// // aten::linear (aten::addmm) of "fc2.weight", "fc2.bias": the first result that is not finite,
/// // [64, 10], operator 7 of the pass
/// ```
/// LibTorch's modules have no names at run time, so that a layer is named by the parameters that
/// its operator reads; an operator without parameters by the count of operators before it. Values
/// that do not reach the result, such as the -inf of a mask before a softmax, are not named. Where
/// a parameter, or a tensor that no operator of `forward` made, was infinite or NaN already, it is
/// named in place of an operator.
///
/// \param module  whose parameters and buffers give the names.
/// \param forward  returns a tensor, or anything that holds some (`for_each_tensor`): the loss, or
///        what a model's forward returns.
/// \return  one line; "" where the result is finite.
///
/// Collective: no, unless `forward` is. Cost: `forward`, and a look at each input and result of
///   each operator, for which the host waits; keeps the tensors that are not finite until the end.
/// Threads: operators that `forward` runs on other threads are not seen.
template <typename Forward>
std::string find_nonfinite_output(const torch::nn::Module& module, Forward&& forward) {
  return detail::find_nonfinite_output(module, [&] {
    std::vector<at::Tensor> results;
    const auto result = forward();
    for_each_tensor(result, [&](const at::Tensor& tensor) { results.push_back(tensor); });
    return results;
  });
}

}  // namespace ddp
