#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "backends/registry.h"

namespace ddp::backends::shm {

/// Gloo, for the calls that shared memory does not carry.
///
/// On one host these are rare, and a Gloo that is connected has three threads and a socket to each
/// rank. So there it connects in the first call, on a thread of its own, which then starts the
/// calls that were made meanwhile: no caller waits for ranks that have not called yet.
///
/// Thread safety: all members. Calls have to be made in the same order on all ranks.
class GlooCarrier {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  /// Owns what it uses. Returns null if it has already ended.
  using Call = std::function<WorkPtr(c10d::Backend&)>;
  using OnFailure = std::function<void(const std::string&)>;

  /// \param gloo  connected.
  explicit GlooCarrier(BackendPtr gloo);
  /// Connects in the first call, from then on within the setup's time for that.
  ///
  /// \param on_failure  gets the reason if that fails; on another thread.
  GlooCarrier(const Setup& setup, OnFailure on_failure);
  ~GlooCarrier();
  GlooCarrier(const GlooCarrier&) = delete;
  GlooCarrier& operator=(const GlooCarrier&) = delete;

  /// \param outputs  the tensors that result() and the future of the handle return.
  WorkPtr start(c10d::OpType type, std::vector<at::Tensor> outputs, Call call);
  void abort();
  void shutdown();
  void set_timeout(std::chrono::milliseconds timeout);
  c10::intrusive_ptr<c10d::Backend::Options> options() const;
  /// How many calls were made.
  uint64_t calls() const { return calls_; }

 private:
  struct OnDemand;

  const OwnerProcess owner_{};
  const BackendPtr connected_;
  const std::shared_ptr<OnDemand> on_demand_;  // if it is not
  std::atomic<uint64_t> calls_{0};
};

}  // namespace ddp::backends::shm
