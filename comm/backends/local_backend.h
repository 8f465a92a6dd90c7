#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/collective_backend.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp::backends {

/// A collective that was over when it began. What it queued on a device lies on the current stream.
class CompletedWork : public c10d::Work {
 public:
  CompletedWork(c10d::OpType type, std::vector<at::Tensor> outputs)
      : c10d::Work(/*rank=*/0, type), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices;
    if (!outputs_.empty() && !outputs_[0].device().is_cpu()) {
      devices.push_back(outputs_[0].device());
    }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// The base of backends without connections: they complete every call before it returns, so nothing
/// can time out or be aborted.
class LocalBackend : public Uniform<c10d::Backend> {
 public:
  LocalBackend(int rank, int size, const std::string& name, std::chrono::milliseconds timeout)
      : Uniform(rank, size), options_(c10::make_intrusive<Options>(name, timeout)) {}

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override {}
  void abort() override {}

  void monitoredBarrier(const c10d::BarrierOptions& /*o*/, bool /*wait_all_ranks*/) override {}

 protected:
  static WorkPtr done(OpType type, Tensors outputs) {
    return c10::make_intrusive<CompletedWork>(type, std::move(outputs));
  }

 private:
  const c10::intrusive_ptr<Options> options_;
};

/// Makes the backend of a group of one rank: a collective copies its input to its output, or leaves
/// it alone. It has no connections, threads or descriptors, so that an axis of size 1 of a mesh
/// costs nothing.
///
/// \param name  that getBackendName() returns: of the backend in whose place it is.
c10::intrusive_ptr<c10d::Backend> make_single_rank_backend(
    const std::string& name, std::chrono::milliseconds timeout);

}  // namespace ddp::backends
