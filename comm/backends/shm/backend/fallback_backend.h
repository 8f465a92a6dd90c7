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
#include "host_memory.h"
#include "work/exchange_flat.h"

namespace ddp::backends::shm {

/// A backend that passes each call to Gloo, unless a derived class carries it itself. Allocates
/// tensors in memory that the ranks of a host share.
class FallbackBackend : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// \param memory  of this rank; null: the backend allocates no tensors.
  FallbackBackend(
      int rank, int world_size, std::shared_ptr<HostMemory> memory,
      c10::intrusive_ptr<c10d::Backend> gloo)
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
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}  // they begin at 0
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  bool supportsSplitting() const override { return gloo_->supportsSplitting(); }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& o) override {
    return gloo_->split(store, ranks, o);
  }
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& o,
      const int& rank, const int& size) override {
    return gloo_->merge(store, o, rank, size);
  }
  void enableCollectivesTiming() override { gloo_->enableCollectivesTiming(); }
  void shutdown() override { gloo_->shutdown(); }
  void abort() override { gloo_->abort(); }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return collective().broadcast(t, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return collective().allreduce(t, o);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return collective().allreduce_sparse(t, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return collective().allreduce_coalesced(t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return collective().reduce(t, o);
  }
  WorkPtr allgather(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective().allgather(to, from, o);
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    return collective().DDP_ALL_GATHER_SINGLE(to, from, o);
  }
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective().allgather_coalesced(to, from, o);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective().allgather_into_tensor_coalesced(to, from, o);
  }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& o) override {
    return collective().gather(to, from, o);
  }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& o) override {
    return collective().scatter(to, from, o);
  }
  WorkPtr reduce_scatter(
      Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& o) override {
    return collective().reduce_scatter(to, from, o);
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return collective().DDP_REDUCE_SCATTER_SINGLE(to, from, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return collective().reduce_scatter_tensor_coalesced(to, from, o);
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return collective().DDP_ALL_TO_ALL_SINGLE(to, from, to_splits, from_splits, o);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return exchange_flat(to, from, [&](auto& all_to, auto& all_from, auto& received, auto& sent) {
      return collective().DDP_ALL_TO_ALL_SINGLE(all_to, all_from, received, sent, o);
    });
  }
  WorkPtr send(Tensors& t, int dst, int tag) override { return gloo_->send(t, dst, tag); }
  WorkPtr recv(Tensors& t, int src, int tag) override { return gloo_->recv(t, src, tag); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return gloo_->recvAnysource(t, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo_->barrier(o); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    gloo_->monitoredBarrier(o, wait_all_ranks);
  }

 protected:
  const c10::intrusive_ptr<c10d::Backend>& gloo() const { return gloo_; }

  /// Whether Gloo has been given a collective since the last call. The same on all ranks if their
  /// calls match.
  bool reset_used_gloo() { return used_gloo_.exchange(false); }

  const std::shared_ptr<Arena> arena_;

 private:
  c10d::Backend& collective() {
    used_gloo_ = true;
    return *gloo_;
  }

  const std::shared_ptr<HostMemory> memory_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<bool> used_gloo_{false};
};

}  // namespace ddp::backends::shm
