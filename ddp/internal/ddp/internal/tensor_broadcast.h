#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Gives a tensor another value, and raises its version: the backward pass of a graph that saved
/// the tensor before throws autograd's error about a variable modified by an inplace operation.
void overwrite(const at::Tensor& tensor, const at::Tensor& value);

/// The same without raising the version, so no graph throws: for values that no backward pass
/// reads.
void overwrite_unversioned(const at::Tensor& tensor, const at::Tensor& value);

/// Whether both have the same bytes, in the order of their elements: not at::equal, which lacks
/// some dtypes and to which NaN differs from itself. Both are on the CPU.
bool have_equal_bytes(const at::Tensor& a, const at::Tensor& b);

/// Where to receive a tensor that is a message of its own: in its own memory, or in a copy, so that
/// the previous value can be compared.
enum class Arrival { InPlace, InCopy };

/// Sends tensors from rank `source` to the others, in messages of about 25 MiB.
class TensorBroadcast {
 public:
  explicit TensorBroadcast(Arrival arrival) : arrival_(arrival) {}

  using Write = c10::function_ref<void(const at::Tensor& tensor, const at::Tensor& received)>;

  /// Sends, or starts to receive. `tensors` has the same shapes and dtypes on every rank; with
  /// none, nothing happens.
  ///
  /// Collective: yes. Blocks: no.
  void start(const std::vector<at::Tensor>& tensors, int source, c10d::ProcessGroup& group);
  /// Waits for each message with `wait`; on ranks other than the source, calls `write` for each
  /// tensor in it.
  void finish(c10::function_ref<void(c10d::Work&)> wait, Write write);

 private:
  struct Message {
    std::vector<at::Tensor> tensors;
    at::Tensor flat;
    c10::intrusive_ptr<c10d::Work> work;
  };
  std::vector<Message> messages_;  // started and not finished
  const Arrival arrival_;
  bool receives_ = false;
};

}  // namespace ddp
