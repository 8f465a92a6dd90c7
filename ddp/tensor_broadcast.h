#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Overwrites tensors with rank `source`'s, in messages of about 25 MiB. Autograd does not see it:
/// versions stay, so a graph that was recorded before can still run backward.
class TensorBroadcast {
 public:
  /// Sends, or starts to receive. `tensors` are the same ones on every rank; nothing happens where
  /// there are none.
  ///
  /// Collective: yes. Blocks: no.
  void start(const std::vector<at::Tensor>& tensors, int source, c10d::ProcessGroup& group);
  /// Waits for each message with `wait`, and copies out of it.
  void finish(c10::function_ref<void(c10d::Work&)> wait);

 private:
  struct Message {
    std::vector<at::Tensor> tensors;
    at::Tensor flat;
    c10::intrusive_ptr<c10d::Work> work;
  };
  std::vector<Message> messages_;  // under way
};

}  // namespace ddp
