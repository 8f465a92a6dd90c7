// One method for all collectives of a backend.
#pragma once

#include <exception>
#include <utility>
#include <vector>

#include <ddp/internal/c10d_names.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "calls/collective.h"
#include "work/composite_work.h"

namespace ddp {

/// Starts collectives in one method.
class CollectiveRunner {
 public:
  virtual ~CollectiveRunner() = default;
  virtual c10::intrusive_ptr<c10d::Work> run(Collective collective) = 0;
};

/// Overrides c10d's collectives, and passes each to run() in one form.
///
/// \tparam Base  c10d::Backend, c10d::ProcessGroup, or a class that derives from one of them.
template <typename Base>
class Uniform : public Base, public CollectiveRunner {
 public:
  using Base::Base;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Splits = std::vector<int64_t>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Kind = CollectiveKind;
  using OpType = c10d::OpType;

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return start(Kind::kBroadcast, [&] { return forms().broadcast(t, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return start(Kind::kAllReduce, [&] { return forms().all_reduce(OpType::ALLREDUCE, t, o); });
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return start(
        Kind::kAllReduce, [&] { return forms().all_reduce(OpType::ALLREDUCE_COALESCED, t, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return start(Kind::kReduce, [&] { return forms().reduce(t, o); });
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::kAllGather, [&] { return forms().all_gather(to, from, o); });
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& o) override {
    return start(Kind::kAllGather, [&] { return forms().all_gather(to, from, o); });
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
    return start(Kind::kGather, [&] { return forms().gather(to, from, o); });
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) override {
    return start(Kind::kScatter, [&] { return forms().scatter(to, from, o); });
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    return start(Kind::kReduceScatter, [&] { return forms().reduce_scatter(to, from, o); });
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    return start(Kind::kReduceScatter, [&] { return forms().reduce_scatter(to, from, o); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    return start_each(
        to, [&](size_t i) { return DDP_REDUCE_SCATTER_SINGLE(to[i], from.at(i), o); });
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) override {
    return start(Kind::kAllToAll, [&] { return forms().all_to_all(to, from, o); });
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, Splits& to_splits, Splits& from_splits,
      const c10d::AllToAllOptions& o) override {
    return start(
        Kind::kAllToAll, [&] { return forms().all_to_all(to, from, to_splits, from_splits, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    return run(Collective::make(Kind::kBarrier, OpType::BARRIER, o, this->size_));
  }

 protected:
  /// This rank's call did not fit the group, and the other ranks wait for it.
  virtual void refused(Kind /*kind*/, const std::exception& /*error*/) {}

 private:
  CollectiveForms forms() const { return {this->rank_, this->size_}; }

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

}  // namespace ddp
