#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <ddp/detail/step_counts.h>
#include <ddp/detail/step_rates.h>
#include <ddp/detail/zero_types.h>
#include <ddp/fused_optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

namespace ddp::detail {

/// The count of steps in a parameter's state; null where the optimizer does not count.
template <typename State>
int64_t* count_in(State& state) {
  return &state.step();
}
inline int64_t* count_in(torch::optim::SGDParamState& /*state*/) { return nullptr; }

/// An optimizer of LibTorch with another step; a class that derives from it has step_scaled().
template <typename Base>
class FusedStep : public Base, public FusedOptimizer {
 public:
  using Base::Base;

  /// Runs the closure, which computes the gradients anew, and steps.
  ///
  /// \return what the closure returns; undefined without one.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      const c10::AutoGradMode with_grad(true);
      loss = closure();
    }
    step_scaled({}, {});
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    sync_step_counts();
    Base::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    Base::load(archive);
    reset_step_counts();
  }

  void sync_step_counts() const override { counts_.sync(count_of()); }
  void reset_step_counts() override { counts_.reset(); }

  void begin_capture() override { rates_.begin_capture(this->param_groups()); }
  void end_capture() noexcept override { rates_.end_capture(); }
  void refresh_numbers() override {
    rates_.refresh(this->param_groups());
    counts_.refresh(count_of());
  }

 protected:
  /// Returns the count in the state of a parameter that has one.
  StepCounts::CountOf count_of() const {
    return [this](const void* parameter) -> int64_t* {
      const auto found = this->state().find(const_cast<void*>(parameter));
      if (found == this->state().end()) return nullptr;
      return count_in(static_cast<typename ZeroTypes<Base>::State&>(*found->second));
    };
  }

  mutable StepCounts counts_;  // mutable: sync() brings the states up to date
  StepRates rates_;
};

}  // namespace ddp::detail
