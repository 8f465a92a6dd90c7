#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <ddp/collective_backend.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../memory/arena.h"
#include "../memory/tensors.h"
#include "gloo_carrier.h"
#include "host_memory.h"

namespace ddp::backends::shm {

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
