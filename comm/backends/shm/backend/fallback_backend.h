#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../memory/arena.h"
#include "../memory/tensors.h"
#include "backends/registry.h"
#include "host_memory.h"

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
  C10_DISABLE_COPY_AND_ASSIGN(GlooCarrier);

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

/// A backend that passes each call to Gloo, unless a derived class carries it itself. Allocates
/// tensors in memory that the ranks of a host share.
class FallbackBackend : public Uniform<c10d::Backend> {
 public:
  using Tensor = at::Tensor;

  /// \param memory  of this rank; null: the backend allocates no tensors.
  FallbackBackend(
      int rank, int world_size, std::shared_ptr<HostMemory> memory,
      std::shared_ptr<GlooCarrier> gloo)
      : Uniform(rank, world_size),
        arena_(memory ? memory->arena() : nullptr),
        memory_(std::move(memory)),
        gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "shm"; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return arena_ != nullptr; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override {
    return allocate_tensor(size, options, *arena_);
  }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::shared_ptr<HostMemory>& host_memory() const { return memory_; }
  /// GradientMemory::least_bytes() of the arena.
  virtual size_t least_in_place() const { return SIZE_MAX; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->options(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}  // they begin at 0
  uint64_t getSequenceNumberForGroup() override { return gloo_->calls(); }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

  // Not collectives that a later barrier has to wait for.
  WorkPtr send(Tensors& t, int dst, int tag) override {
    return gloo_->start(
        OpType::SEND, t, [=](auto& gloo) mutable { return gloo.send(t, dst, tag); });
  }
  WorkPtr recv(Tensors& t, int src, int tag) override {
    return gloo_->start(
        OpType::RECV, t, [=](auto& gloo) mutable { return gloo.recv(t, src, tag); });
  }
  WorkPtr recvAnysource(Tensors& t, int tag) override {
    return gloo_->start(
        OpType::RECVANYSOURCE, t, [=](auto& gloo) mutable { return gloo.recvAnysource(t, tag); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    const auto work = gloo_->start(OpType::BARRIER, {}, [=](auto& gloo) {
      gloo.monitoredBarrier(o, wait_all_ranks);
      return WorkPtr();
    });
    if (work) work->wait();
  }

  WorkPtr run(Collective c) override {
    if (c.kind != Kind::Barrier) used_gloo_ = true;
    auto results = c.results();
    return gloo_->start(
        c.type, std::move(results), [c = std::move(c)](auto& gloo) { return run_on(gloo, c); });
  }

 protected:
  const std::shared_ptr<GlooCarrier>& shared_gloo() const { return gloo_; }

  /// Whether Gloo has been given a collective since the last call. The same on all ranks if their
  /// calls match.
  bool reset_used_gloo() { return used_gloo_.exchange(false); }

  const std::shared_ptr<Arena> arena_;

 private:
  const std::shared_ptr<HostMemory> memory_;
  const std::shared_ptr<GlooCarrier> gloo_;
  std::atomic<bool> used_gloo_{false};
};

}  // namespace ddp::backends::shm
