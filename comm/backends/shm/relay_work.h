#pragma once

#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "exchange.h"

namespace ddp::backends::shm {

/// The handle of a collective that goes through several exchanges; whoever sees its end says so.
/// Whoever waits drives the exchanges.
class RelayWork : public c10d::Work {
 public:
  RelayWork(
      std::vector<std::shared_ptr<Exchange>> exchanges, int rank, c10d::OpType type,
      const char* title, std::vector<at::Tensor> outputs);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// Once. What callbacks on the future throw is logged.
  void end(const std::exception_ptr& error) noexcept;

 private:
  std::vector<std::shared_ptr<Exchange>> exchanges_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ddp::backends::shm
