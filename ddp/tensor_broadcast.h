#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Gives a tensor another value. A graph that saved the tensor before notices it: its backward pass
/// throws autograd's error about what an in-place operation changed.
void overwrite(const at::Tensor& tensor, const at::Tensor& value);

/// The same, and no graph notices it: for values that no backward pass reads.
void overwrite_unnoticed(const at::Tensor& tensor, const at::Tensor& value);

/// Where a tensor arrives that is a message of its own: in its own memory, or beside, so that the
/// value before can be looked at.
enum class Arrival { InPlace, Beside };

/// Sends tensors from rank `source` to the others, in messages of about 25 MiB.
class TensorBroadcast {
 public:
  explicit TensorBroadcast(Arrival arrival) : arrival_(arrival) {}

  /// Takes over what was received for a tensor.
  using Take = c10::function_ref<void(const at::Tensor& tensor, const at::Tensor& received)>;

  /// Sends, or starts to receive. `tensors` are the same ones on every rank; nothing happens where
  /// there are none.
  ///
  /// Collective: yes. Blocks: no.
  void start(const std::vector<at::Tensor>& tensors, int source, c10d::ProcessGroup& group);
  /// Waits for each message with `wait`, and calls `take` for each tensor in it, but on the source.
  void finish(c10::function_ref<void(c10d::Work&)> wait, Take take);

 private:
  struct Message {
    std::vector<at::Tensor> tensors;
    at::Tensor flat;
    c10::intrusive_ptr<c10d::Work> work;
  };
  std::vector<Message> messages_;  // under way
  const Arrival arrival_;
  bool receives_ = false;
};

}  // namespace ddp
