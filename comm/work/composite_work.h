#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "calls/work_parts.h"

namespace ddp {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Combines several works into one, with a last step once all of them are complete.
///
/// The step runs once: in the first `wait()`, in an `isCompleted()` that finds all works complete,
/// or in a callback of `getFuture()`. The step copies out of buffers that a backend needed in place
/// of the caller's tensors, so the step must own them. On a device the step is queued on the
/// current stream of the thread that runs it; the current streams of later callers wait for it.
/// That stream may be another one than the buffers were allocated on, which must not reuse them
/// before.
class CompositeWork : public c10d::Work, public WorkParts {
 public:
  /// \param parts  not empty.
  /// \param outputs  the tensors that `result()` returns.
  /// \param buffers  all memory that the parts and the step use and the caller does not have.
  CompositeWork(
      std::vector<WorkPtr> parts, std::function<void()> finish, std::vector<at::Tensor> outputs,
      std::vector<at::Tensor> buffers = {});

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  const std::vector<WorkPtr>& parts() const override { return parts_; }

 private:
  void finish_once();
  std::vector<c10::Device> devices() const;  // of the outputs, but for the CPU

  std::vector<WorkPtr> parts_;
  std::function<void()> finish_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> buffers_;  // until the step is queued
  std::once_flag finished_;
  std::optional<c10::Event> finished_on_device_;
};

/// Combines several works into one, without a last step.
///
/// \param parts, outputs  as CompositeWork's.
WorkPtr combine_works(std::vector<WorkPtr> parts, std::vector<at::Tensor> outputs = {});

}  // namespace ddp
