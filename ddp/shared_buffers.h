#pragma once

#include <cstdint>
#include <unordered_map>

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>

#include "module_state.h"
#include "tensor_broadcast.h"

namespace ddp {

/// A module's buffers, which all ranks take from one of them again and again.
///
/// A graph that is still to run backward may have saved a buffer, and would compute with another
/// rank's value: autograd notices where a value changes, as it does in Python. Not so the running
/// statistics of a batch normalization, which are saved and not read: two forward passes before a
/// backward pass are to work. A value that is the same on both ranks is left alone.
class SharedBuffers {
 public:
  /// \param enabled  with false nothing is shared.
  SharedBuffers(const torch::nn::Module& module, const Names& ignored, bool enabled)
      : finder_(module, ignored), enabled_(enabled) {}

  /// A forward pass of this rank may change them.
  void may_change();
  /// Whether one may have, since they were shared.
  bool are_own() const { return are_own_; }

  /// Sends rank `source`'s, or starts to receive them.
  ///
  /// Collective: yes. Blocks: no.
  void start(int source, c10d::ProcessGroup& group);
  /// Waits for them, with `wait`, and takes them over.
  void finish(c10::function_ref<void(c10d::Work&)> wait);

 private:
  void take(const at::Tensor& buffer, const at::Tensor& received) const;
  bool is_unchanged(const at::Tensor& buffer) const;

  const BufferFinder finder_;
  const bool enabled_;
  FoundBuffers found_;  // under way
  TensorBroadcast broadcast_{Arrival::Beside};
  bool are_own_ = false;
  bool on_accelerator_ = true;  // where they were found last; until then either may be
  // Before the first forward pass since they were shared; of buffers on an accelerator.
  std::unordered_map<const void*, int64_t> versions_;
};

}  // namespace ddp
