#pragma once

#include <memory>

#include <ddp/reducer.h>
#include <torch/csrc/autograd/function_hook.h>

namespace ddp {

/// Tells the reducer that the gradient of one parameter was accumulated.
class Reducer::GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer& reducer, size_t index) : reducer_(reducer), index_(index) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    reducer_.on_gradient(index_);
    return outputs;
  }

 private:
  Reducer& reducer_;
  size_t index_;
};

/// Tells the reducer that a backward pass begins, on the node that made an output of forward. Such
/// a node may outlive the reducer.
class Reducer::OutputHook : public torch::autograd::FunctionPreHook {
 public:
  explicit OutputHook(std::shared_ptr<Reducer*> self) : self_(std::move(self)) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    auto* reducer = *self_;
    if (reducer && (reducer->phase_ == Phase::Armed || reducer->phase_ == Phase::Done)) {
      reducer->begin_backward();
    }
    return gradients;
  }

 private:
  std::shared_ptr<Reducer*> self_;
};

/// Travels with autograd's final callback: autograd destroys a callback that it does not call, when
/// the backward pass ends in an exception.
class Reducer::Abandonment {
 public:
  explicit Abandonment(std::shared_ptr<Reducer*> self) : self_(std::move(self)) {}
  ~Abandonment() {
    if (!called_off && *self_) (*self_)->on_abandoned();
  }
  Abandonment(const Abandonment&) = delete;
  Abandonment& operator=(const Abandonment&) = delete;

  bool called_off = false;

 private:
  std::shared_ptr<Reducer*> self_;
};

}  // namespace ddp
