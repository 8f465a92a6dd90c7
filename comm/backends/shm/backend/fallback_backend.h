#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/c10d_names.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "../memory/arena.h"
#include "../memory/tensors.h"
#include "gloo_carrier.h"
#include "host_memory.h"
#include "work/exchange_flat.h"

namespace ddp::backends::shm {

/// A backend that passes each call to Gloo, unless a derived class carries it itself. Allocates
/// tensors in memory that the ranks of a host share.
class FallbackBackend : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// \param memory  of this rank; null: the backend allocates no tensors.
  FallbackBackend(
      int rank, int world_size, std::shared_ptr<HostMemory> memory,
      std::shared_ptr<GlooCarrier> gloo)
      : c10d::Backend(rank, world_size),
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

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return by_gloo(OpType::BROADCAST, t, [=](auto& gloo) mutable { return gloo.broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return by_gloo(OpType::ALLREDUCE, t, [=](auto& gloo) mutable { return gloo.allreduce(t, o); });
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return by_gloo(OpType::_ALLREDUCE_SPARSE, t, [=](auto& gloo) mutable {
      return gloo.allreduce_sparse(t, o);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return by_gloo(OpType::ALLREDUCE_COALESCED, t, [=](auto& gloo) mutable {
      return gloo.allreduce_coalesced(t, o);
    });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return by_gloo(OpType::REDUCE, t, [=](auto& gloo) mutable { return gloo.reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return by_gloo(OpType::ALLGATHER, first(to), [=](auto& gloo) mutable {
      return gloo.allgather(to, from, o);
    });
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    return by_gloo(OpType::_ALLGATHER_BASE, {to}, [=](auto& gloo) mutable {
      return gloo.DDP_ALL_GATHER_SINGLE(to, from, o);
    });
  }
  WorkPtr allgather_coalesced(
      TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return by_gloo(OpType::ALLGATHER_COALESCED, first(to), [=](auto& gloo) mutable {
      return gloo.allgather_coalesced(to, from, o);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return by_gloo(OpType::ALLGATHER_COALESCED, to, [=](auto& gloo) mutable {
      return gloo.allgather_into_tensor_coalesced(to, from, o);
    });
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o) override {
    return by_gloo(
        OpType::GATHER, first(to), [=](auto& gloo) mutable { return gloo.gather(to, from, o); });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override {
    return by_gloo(
        OpType::SCATTER, to, [=](auto& gloo) mutable { return gloo.scatter(to, from, o); });
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    return by_gloo(OpType::REDUCE_SCATTER, to, [=](auto& gloo) mutable {
      return gloo.reduce_scatter(to, from, o);
    });
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return by_gloo(OpType::_REDUCE_SCATTER_BASE, {to}, [=](auto& gloo) mutable {
      return gloo.DDP_REDUCE_SCATTER_SINGLE(to, from, o);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return by_gloo(OpType::REDUCE_SCATTER, to, [=](auto& gloo) mutable {
      return gloo.reduce_scatter_tensor_coalesced(to, from, o);
    });
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return by_gloo(OpType::ALLTOALL_BASE, {to}, [=](auto& gloo) mutable {
      return gloo.DDP_ALL_TO_ALL_SINGLE(to, from, to_splits, from_splits, o);
    });
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return exchange_flat(to, from, [&](auto& all_to, auto& all_from, auto& received, auto& sent) {
      return FallbackBackend::DDP_ALL_TO_ALL_SINGLE(all_to, all_from, received, sent, o);
    });
  }
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
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return gloo_->start(OpType::BARRIER, {}, [=](auto& gloo) { return gloo.barrier(o); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    const auto work = gloo_->start(OpType::BARRIER, {}, [=](auto& gloo) {
      gloo.monitoredBarrier(o, wait_all_ranks);
      return WorkPtr();
    });
    if (work) work->wait();
  }

 protected:
  using OpType = c10d::OpType;

  GlooCarrier& gloo() const { return *gloo_; }
  const std::shared_ptr<GlooCarrier>& shared_gloo() const { return gloo_; }

  /// Whether Gloo has been given a collective since the last call. The same on all ranks if their
  /// calls match.
  bool reset_used_gloo() { return used_gloo_.exchange(false); }

  const std::shared_ptr<Arena> arena_;

 private:
  WorkPtr by_gloo(OpType type, Tensors outputs, GlooCarrier::Call call) {
    used_gloo_ = true;
    return gloo_->start(type, std::move(outputs), std::move(call));
  }
  static Tensors first(const TensorLists& lists) { return lists.empty() ? Tensors() : lists[0]; }

  const std::shared_ptr<HostMemory> memory_;
  const std::shared_ptr<GlooCarrier> gloo_;
  std::atomic<bool> used_gloo_{false};
};

}  // namespace ddp::backends::shm
