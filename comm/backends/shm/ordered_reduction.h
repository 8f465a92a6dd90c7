#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp::backends::shm {

/// An all-reduce over a backend that combines elements in the order of its ranks: what comes out
/// does not depend on where in a tensor an element lies, as it does in the ring of Gloo's own.
///
/// Each rank combines its part of all tensors and then has everybody's, so as many bytes travel as
/// in a ring; meanwhile it holds three times the tensor. Three steps, each the same on all ranks:
/// construction sends the parts.
class OrderedReduction {
 public:
  /// \param tensor  contiguous, on the CPU; the result is in it after finish().
  /// \param options  with an operation that can_reduce, other than AVG.
  OrderedReduction(
      c10d::Backend& backend, const at::Tensor& tensor, const c10d::AllreduceOptions& options);

  using Wait = c10::function_ref<void(c10d::Work&)>;

  /// Waits for the parts, combines them, and sends the result.
  void combine(Wait wait);
  /// Waits for the others' results.
  void finish(Wait wait);

 private:
  c10d::Backend& backend_;
  at::Tensor tensor_;
  c10d::AllreduceOptions options_;
  at::Tensor all_;    // of this rank, and then of the result; padded to parts of one size
  at::Tensor parts_;  // of all ranks, of what this rank combines
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ddp::backends::shm
