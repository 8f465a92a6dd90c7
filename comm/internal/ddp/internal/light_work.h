// Handles of collectives that keep no memory.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// Implemented by handles that keep their tensors alive, and can be replaced.
class KeepsTensors {
 public:
  virtual ~KeepsTensors() = default;

  /// A handle of the same collective that has isCompleted() and exception(), and keeps no tensor.
  virtual c10::intrusive_ptr<c10d::Work> without_tensors() = 0;
};

/// For a collective that a stream waits for already, and whose end the host has to find out later.
/// `work` keeps the tensors that it wrote to, as NCCL's does, until its last owner drops it.
///
/// \return  a handle without the tensors; `work` itself where nothing is known of its class.
c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work);

}  // namespace ddp
