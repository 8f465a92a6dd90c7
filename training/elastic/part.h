#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <ddp/detail/elastic_part.h>
#include <ddp/internal/checkpoint_part.h>
#include <ddp/zero.h>

namespace ddp::elastic {

/// A part of the state of an elastic run.
class Part {
 public:
  Part(
      std::string name, detail::CheckpointPartPtr state, detail::ElasticHooks hooks,
      bool is_per_rank);

  const std::string& name() const { return name_; }
  bool is_per_rank() const { return is_per_rank_; }
  /// A module or an optimizer. It is large, and changes in steps, apart from a module's buffers.
  bool is_bulk() const {
    return sharded_ == nullptr && (state_->module() != nullptr || state_->optimizer() != nullptr);
  }
  /// An optimizer of which each rank has a part; null for another part. What this class calls its
  /// state are the options alone.
  ZeroRedundancyOptimizerBase* sharded() const { return sharded_; }
  /// Devices of a module's parameters other than the CPU, each once, in their order.
  std::vector<c10::Device> devices() const;
  bool compares_itself() const { return hooks_.compares_itself; }

  /// Call it before the first turn of a generation: note() does not search the module.
  void find_buffers();
  /// Remembers what a turn may change before its step.
  void note();
  /// Takes it back.
  void undo();

  /// The whole state; its tensors may be the live ones.
  c10::IValue state();
  /// For a bulk part: the buffers of a module, else nothing. For any other part: state().
  c10::IValue small_state();
  void load(const c10::IValue& state);
  /// A module's tensors, or an optimizer's, on the device of the first parameter: what loads them
  /// there then waits for none of them. Optimizers read counts of steps on the host.
  c10::IValue on_own_device(const c10::IValue& state) const;
  void load_small(const c10::IValue& state);

  /// In which order the parts follow a new group: hooks and averagers before the wrappers that use
  /// them, and these before optimizers that are cut over their ranks.
  enum class Follows { First, AsModule, AfterModules, Never };
  Follows follows() const;
  void rebind(const ProcessGroup& group);

 private:
  void copy_buffers(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) const;

  const std::string name_;
  const detail::CheckpointPartPtr state_;
  const detail::ElasticHooks hooks_;
  const bool is_per_rank_;
  ZeroRedundancyOptimizerBase* const sharded_;
  std::function<void()> go_back_;    // of a part that is not bulk
  std::vector<at::Tensor> buffers_;  // of a module, and their values at the last boundary
  std::vector<at::Tensor> noted_;
};

}  // namespace ddp::elastic
