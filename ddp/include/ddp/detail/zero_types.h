#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace ddp::detail {

/// Where a whole parameter lies in 1-D memory that an optimizer steps in its place.
struct WholeTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};
using WholeTensors = std::unordered_map<const void*, WholeTensor>;  // by TensorImpl

/// The types of an optimizer's options and of its state of a parameter.
template <typename Optimizer>
struct ZeroTypes {
  static constexpr bool kAreKnown = false;
};
template <typename OptionsType, typename StateType, bool need_whole_tensors = false>
struct KnownZeroTypes {
  static constexpr bool kAreKnown = true;
  /// Whether a step of a part of a parameter would differ from that part of a step.
  static constexpr bool kNeedWholeTensors = need_whole_tensors;
  using Options = OptionsType;
  using State = StateType;
};
template <>
struct ZeroTypes<torch::optim::Adagrad>
    : KnownZeroTypes<torch::optim::AdagradOptions, torch::optim::AdagradParamState> {};
template <>
struct ZeroTypes<torch::optim::Adam>
    : KnownZeroTypes<torch::optim::AdamOptions, torch::optim::AdamParamState> {};
template <>
struct ZeroTypes<torch::optim::AdamW>
    : KnownZeroTypes<torch::optim::AdamWOptions, torch::optim::AdamWParamState> {};
template <>
struct ZeroTypes<torch::optim::RMSprop>
    : KnownZeroTypes<torch::optim::RMSpropOptions, torch::optim::RMSpropParamState> {};
template <>
struct ZeroTypes<torch::optim::SGD>
    : KnownZeroTypes<torch::optim::SGDOptions, torch::optim::SGDParamState> {};

}  // namespace ddp::detail
