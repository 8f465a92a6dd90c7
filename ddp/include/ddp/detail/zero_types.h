#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace ddp::detail {

/// The types of an optimizer's options and of its state of a parameter.
template <typename Optimizer>
struct ZeroTypes {
  static constexpr bool kAreKnown = false;
};
template <typename OptionsType, typename StateType>
struct KnownZeroTypes {
  static constexpr bool kAreKnown = true;
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
