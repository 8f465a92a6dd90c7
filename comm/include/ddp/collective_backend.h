// One method for all collectives of a backend: for who writes one.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include <ddp/collective.h>
#include <ddp/export.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

// Later LibTorch renames these methods of c10d::Backend. It warns about the old names, and its own
// classes override the new ones.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
#define DDP_ALL_GATHER_SINGLE all_gather_single
#define DDP_REDUCE_SCATTER_SINGLE reduce_scatter_single
#define DDP_ALL_TO_ALL_SINGLE all_to_all_single
#else
#define DDP_ALL_GATHER_SINGLE _allgather_base
#define DDP_REDUCE_SCATTER_SINGLE _reduce_scatter_base
#define DDP_ALL_TO_ALL_SINGLE alltoall_base
#endif

namespace ddp {

/// Starts collectives in one method.
class DDP_API CollectiveRunner {
 public:
  virtual ~CollectiveRunner() = default;
  /// Starts the collective, and returns its handle.
  virtual c10::intrusive_ptr<c10d::Work> run(Collective collective) = 0;
};

/// Combines several handles into one.
///
/// \param outputs  the tensors that `result()` returns.
DDP_API c10::intrusive_ptr<c10d::Work> combine_works(
    std::vector<c10::intrusive_ptr<c10d::Work>> parts, std::vector<at::Tensor> outputs = {});

/// Has a backend run the collective: in its run(), or, of a class of c10d's own, by the method that
/// has its form.
DDP_API c10::intrusive_ptr<c10d::Work> run_on(c10d::Backend& backend, Collective collective);

/// Overrides c10d's collectives, and passes each to run() in one form.
///
/// \tparam Base  c10d::Backend, c10d::ProcessGroup, or a class that derives from one of them.
template <typename Base>
class Uniform : public Base, public CollectiveRunner {
 public:
  using Base::Base;

  /// \cond
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Splits = std::vector<int64_t>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Kind = CollectiveKind;
  using OpType = c10d::OpType;

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return start(Kind::Broadcast, [&] { return forms().broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return start(Kind::AllReduce, [&] { return forms().all_reduce(OpType::ALLREDUCE, t, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return start(
        Kind::AllReduce, [&] { return forms().all_reduce(OpType::ALLREDUCE_COALESCED, t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return start(Kind::Reduce, [&] { return forms().reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::AllGather, [&] { return forms().all_gather(to, from, o); });
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::AllGather, [&] { return forms().all_gather(to, from, o); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return start_each(to, [&](size_t i) { return DDP_ALL_GATHER_SINGLE(to[i], from.at(i), o); });
  }
  WorkPtr allgather_coalesced(
      TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    std::vector<WorkPtr> works;
    Tensors results;
    for (size_t i = 0; i < from.size(); ++i) {
      TensorLists of_ranks(1);
      for (auto& of_rank : to) of_ranks[0].push_back(of_rank.at(i));
      Tensors own{from[i]};
      works.push_back(allgather(of_ranks, own, o));
      results.insert(results.end(), of_ranks[0].begin(), of_ranks[0].end());
    }
    return combine_works(std::move(works), std::move(results));
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& o) override {
    return start(Kind::Gather, [&] { return forms().gather(to, from, o); });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override {
    return start(Kind::Scatter, [&] { return forms().scatter(to, from, o); });
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    return start(Kind::ReduceScatter, [&] { return forms().reduce_scatter(to, from, o); });
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return start(Kind::ReduceScatter, [&] { return forms().reduce_scatter(to, from, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return start_each(
        to, [&](size_t i) { return DDP_REDUCE_SCATTER_SINGLE(to[i], from.at(i), o); });
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return start(Kind::AllToAll, [&] { return forms().all_to_all(to, from, o); });
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, Splits& to_splits, Splits& from_splits,
      const c10d::AllToAllOptions& o) override {
    return start(
        Kind::AllToAll, [&] { return forms().all_to_all(to, from, to_splits, from_splits, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return run(Collective::make(Kind::Barrier, OpType::BARRIER, o, this->size_));
  }
  /// \endcond

 protected:
  /// This rank's call did not fit the group, and the other ranks wait for it.
  virtual void refused(Kind /*kind*/, const std::exception& /*error*/) {}

 private:
  detail::CollectiveForms forms() const { return {this->rank_, this->size_}; }

  template <typename Make>
  WorkPtr start(Kind kind, const Make& make) {
    return run(made(kind, make));
  }
  template <typename Make>
  Collective made(Kind kind, const Make& make) {
    try {
      return make();
    } catch (const std::exception& error) {
      refused(kind, error);
      throw;
    }
  }
  template <typename Start>
  static WorkPtr start_each(const Tensors& to, const Start& start) {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < to.size(); ++i) works.push_back(start(i));
    return works.size() == 1 ? works[0] : combine_works(std::move(works), to);
  }
};

/// Base class of a program's own backends: they override run() and getBackendName().
using CollectiveBackend = Uniform<c10d::Backend>;

}  // namespace ddp
