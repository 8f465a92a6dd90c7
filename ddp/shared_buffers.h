#pragma once

#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>

#include "module_state.h"
#include "tensor_broadcast.h"

namespace ddp {

/// A module's buffers, which all ranks take from one of them again and again.
class SharedBuffers {
 public:
  /// \param enabled  with false nothing is shared.
  SharedBuffers(const torch::nn::Module& module, const Names& ignored, bool enabled)
      : finder_(module, ignored), enabled_(enabled) {}

  /// A forward pass of this rank may change them.
  void may_change() { are_own_ = true; }
  /// Whether one may have, since they were shared.
  bool are_own() const { return are_own_; }

  /// Sends rank `source`'s, or starts to receive them.
  ///
  /// Collective: yes. Blocks: no.
  void start(int source, c10d::ProcessGroup& group) {
    if (enabled_ && group.getSize() > 1) broadcast_.start(finder_.find(), source, group);
  }
  /// Waits for them, with `wait`, and takes them over.
  void finish(c10::function_ref<void(c10d::Work&)> wait) {
    broadcast_.finish(wait);
    are_own_ = false;
  }

 private:
  const BufferFinder finder_;
  const bool enabled_;
  TensorBroadcast broadcast_;
  bool are_own_ = false;
};

}  // namespace ddp
