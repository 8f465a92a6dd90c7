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
#include "gloo_on_demand.h"
#include "host_memory.h"
#include "work/exchange_flat.h"

namespace ddp::backends::shm {

/// What the groups of a job share on a rank.
struct JobResources {
  std::shared_ptr<HostMemory> memory;
  BackendPtr gloo;  // connects all ranks of the job
};

/// A backend that passes each call to Gloo, unless a derived class carries it itself. Allocates
/// tensors in memory that the ranks of a host share.
class FallbackBackend : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  /// \param job  without memory, the backend allocates no tensors.
  FallbackBackend(
      int rank, int world_size, std::chrono::milliseconds timeout, JobResources job,
      std::shared_ptr<GlooOnDemand> gloo)
      : c10d::Backend(rank, world_size),
        arena_(job.memory ? job.memory->arena() : nullptr),
        options_(c10::make_intrusive<Options>("shm", timeout)),
        job_(std::move(job)),
        gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "shm"; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return arena_ != nullptr; }
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override {
    return allocate_tensor(size, options, *arena_);
  }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const JobResources& job() const { return job_; }
  /// GradientMemory::least_bytes() of the arena.
  virtual size_t least_in_place() const { return SIZE_MAX; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    const auto gloo = gloo_->if_connected();
    return gloo ? gloo->getBackendOptions() : options_;
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    if (const auto gloo = gloo_->if_connected()) gloo->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}  // they begin at 0
  uint64_t getSequenceNumberForGroup() override {
    const auto gloo = gloo_->if_connected();
    return gloo ? gloo->getSequenceNumberForGroup() : 0;
  }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& o) override {
    const auto gloo = connected();
    return gloo->split(store, ranks, o == options_ ? gloo->getBackendOptions() : o);
  }
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<Options>& o,
      const int& rank, const int& size) override {
    const auto gloo = connected();
    return gloo->merge(store, o == options_ ? gloo->getBackendOptions() : o, rank, size);
  }
  void enableCollectivesTiming() override {
    if (const auto gloo = gloo_->if_connected()) gloo->enableCollectivesTiming();
  }
  void shutdown() override {
    if (const auto gloo = gloo_->if_connected()) gloo->shutdown();
  }
  void abort() override { gloo_->abort(); }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return collective()->broadcast(t, o);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return collective()->allreduce(t, o);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return collective()->allreduce_sparse(t, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return collective()->allreduce_coalesced(t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return collective()->reduce(t, o);
  }
  WorkPtr allgather(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective()->allgather(to, from, o);
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    return collective()->DDP_ALL_GATHER_SINGLE(to, from, o);
  }
  WorkPtr allgather_coalesced(
      std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective()->allgather_coalesced(to, from, o);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return collective()->allgather_into_tensor_coalesced(to, from, o);
  }
  WorkPtr gather(std::vector<Tensors>& to, Tensors& from, const c10d::GatherOptions& o) override {
    return collective()->gather(to, from, o);
  }
  WorkPtr scatter(Tensors& to, std::vector<Tensors>& from, const c10d::ScatterOptions& o) override {
    return collective()->scatter(to, from, o);
  }
  WorkPtr reduce_scatter(
      Tensors& to, std::vector<Tensors>& from, const c10d::ReduceScatterOptions& o) override {
    return collective()->reduce_scatter(to, from, o);
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return collective()->DDP_REDUCE_SCATTER_SINGLE(to, from, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return collective()->reduce_scatter_tensor_coalesced(to, from, o);
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return collective()->DDP_ALL_TO_ALL_SINGLE(to, from, to_splits, from_splits, o);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return exchange_flat(to, from, [&](auto& all_to, auto& all_from, auto& received, auto& sent) {
      return collective()->DDP_ALL_TO_ALL_SINGLE(all_to, all_from, received, sent, o);
    });
  }
  WorkPtr send(Tensors& t, int dst, int tag) override { return connected()->send(t, dst, tag); }
  WorkPtr recv(Tensors& t, int src, int tag) override { return connected()->recv(t, src, tag); }
  WorkPtr recvAnysource(Tensors& t, int tag) override { return connected()->recvAnysource(t, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return connected()->barrier(o); }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool wait_all_ranks) override {
    connected()->monitoredBarrier(o, wait_all_ranks);
  }

 protected:
  /// Gloo, which a collective of all ranks connects if it is not connected.
  virtual BackendPtr connected() {
    return gloo_->connect([] { return ""; });
  }
  const std::shared_ptr<GlooOnDemand>& gloo() const { return gloo_; }
  std::chrono::milliseconds timeout() const { return options_->timeout; }

  /// Whether Gloo has been given a collective since the last call. The same on all ranks if their
  /// calls match.
  bool reset_used_gloo() { return used_gloo_.exchange(false); }

  const std::shared_ptr<Arena> arena_;

 private:
  BackendPtr collective() {
    used_gloo_ = true;
    return connected();
  }

  const c10::intrusive_ptr<Options> options_;  // until Gloo, which has its own, is connected
  const JobResources job_;
  const std::shared_ptr<GlooOnDemand> gloo_;
  std::atomic<bool> used_gloo_{false};
};

}  // namespace ddp::backends::shm
