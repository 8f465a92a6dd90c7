#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collective_backend.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backends/completed_work.h"

namespace ddp::backends {

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

}  // namespace ddp::backends
