#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>

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

}  // namespace ddp::detail
