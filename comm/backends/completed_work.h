#pragma once

#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
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

}  // namespace ddp::backends
