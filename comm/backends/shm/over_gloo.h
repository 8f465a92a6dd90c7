#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ddp::backends::shm {

/// A backend that does everything through another one: what a derived class does not do itself.
class OverGloo : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  OverGloo(int rank, int world_size, c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(rank, world_size), gloo_(std::move(gloo)) {}

  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
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
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) override {
    return collective()._allgather_base(to, from, o);
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
  WorkPtr _reduce_scatter_base(
      Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return collective()._reduce_scatter_base(to, from, o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return collective().reduce_scatter_tensor_coalesced(to, from, o);
  }
  WorkPtr alltoall_base(
      Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
      const c10d::AllToAllOptions& o) override {
    return collective().alltoall_base(to, from, to_splits, from_splits, o);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return collective().alltoall(to, from, o);
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

  /// Whether the other one was given a collective since this was last asked. Where the ranks' calls
  /// match, so do the answers.
  bool began_collectives() { return began_.exchange(false); }

 private:
  c10d::Backend& collective() {
    began_ = true;
    return *gloo_;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::atomic<bool> began_{false};
};

}  // namespace ddp::backends::shm
