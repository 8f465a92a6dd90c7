#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp::backends::shm {

/// An all-reduce over a backend that combines elements in the order of its ranks. In Gloo's own
/// ring the order depends on the position of an element in the tensor.
///
/// Each rank combines one share of all tensors, and then gathers the other ranks' shares. As many
/// bytes are sent as in a ring. Meanwhile a rank holds three times the tensor. There are three
/// steps, the same on all ranks: the constructor sends the shares.
class OrderedReduction {
 public:
  /// \param tensor  contiguous, on the CPU; the result is in it after finish().
  /// \param options  with an operation that can_reduce, other than AVG.
  OrderedReduction(
      c10d::Backend& backend, const at::Tensor& tensor, const c10d::AllreduceOptions& options);

  using Wait = c10::function_ref<void(c10d::Work&)>;

  /// Waits for the shares, combines them, and sends the result.
  void combine(Wait wait);
  /// Waits for the results of the other ranks.
  void finish(Wait wait);

 private:
  c10d::Backend& backend_;
  at::Tensor tensor_;
  c10d::AllreduceOptions options_;
  at::Tensor all_;    // this rank's tensor, later the result; padded to shares of one size
  at::Tensor parts_;  // the share that this rank combines, of each rank's tensor
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp::backends::shm
