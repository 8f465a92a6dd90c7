#pragma once

#include <exception>
#include <memory>
#include <utility>

#include <ddp/reducer.h>
#include <torch/csrc/autograd/function_hook.h>

#include "backward_result.h"

namespace ddp {

/// Tells the reducer that the gradient of one parameter was accumulated.
class Reducer::GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(Reducer& reducer, size_t index) : reducer_(reducer), index_(index) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& gradients) override {
    reducer_.on_gradient(index_, !gradients.empty() && gradients.front().defined());
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
    if (auto* reducer = *self_) reducer->on_output();
    return gradients;
  }

 private:
  std::shared_ptr<Reducer*> self_;
};

/// Travels with autograd's final callback: autograd destroys a callback that it does not call, when
/// the backward pass ends in an exception.
class Reducer::Abandonment {
 public:
  /// To be created on a thread that runs the backward pass.
  explicit Abandonment(std::shared_ptr<Reducer*> self)
      : self_(std::move(self)), pass_((*self_)->pass_), result_(current_backward_result()) {}
  ~Abandonment() {
    if (called_off || !*self_) return;
    const bool known = result_ && result_->hasError();
    (*self_)->on_abandoned(pass_, known ? result_->exception_ptr() : nullptr);
  }
  Abandonment(const Abandonment&) = delete;
  Abandonment& operator=(const Abandonment&) = delete;

  bool called_off = false;

 private:
  std::shared_ptr<Reducer*> self_;
  int64_t pass_;
  c10::intrusive_ptr<c10::ivalue::Future> result_;
};

}  // namespace ddp
