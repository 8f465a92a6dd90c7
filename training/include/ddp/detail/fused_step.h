#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <ddp/detail/zero_types.h>
#include <ddp/export.h>
#include <ddp/fused_optimizer.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

namespace ddp::detail {

/// How often each parameter was stepped, on the parameter's device, where a kernel reads it and may
/// leave a step out. The optimizer's state has the same count for files and programs; on a GPU it
/// counts the steps that were skipped there, too, until sync().
///
/// Invariant: after a call, `seen` of an entry is the count in the state that belongs to it. A
/// state with another count was put there since, and has the right one.
class DDP_API StepCounts {
 public:
  /// The count in a parameter's state; null where it has none.
  using CountOf = std::function<int64_t*(const void* parameter)>;

  /// Counts a step of each parameter, in its state and on its device.
  ///
  /// \param parameters  of one device.
  /// \return the counts of the parameters, shapes [], float32 as the kernels have it.
  std::vector<at::Tensor> advance(
      const std::vector<at::Tensor>& parameters, const CountOf& count_of);

  /// Takes a step back that advance() counted and `found_inf`, shape [], has skipped.
  void take_back(
      const std::vector<at::Tensor>& parameters, const at::Tensor& found_inf,
      const CountOf& count_of);

  /// Writes the counts of GPUs into the states. Blocks: host, while a GPU has work.
  void sync(const CountOf& count_of);

  /// Says that the counts of the states are right: the next advance() or refresh() takes them.
  void reset() { are_of_states_ = false; }
  /// Writes the counts of states to the devices after a reset().
  void refresh(const CountOf& count_of);

 private:
  struct Entry {
    at::Tensor on_device;  // stays the same tensor: a captured graph counts in it
    int64_t seen = -1;
  };

  bool are_of_states_ = true;
  std::unordered_map<const void*, Entry> entries_;  // by TensorImpl
};

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
