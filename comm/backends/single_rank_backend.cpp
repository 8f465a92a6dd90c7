#include "backends/single_rank_backend.h"

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/c10d_names.h>
#include <ddp/internal/check.h>

#include "backends/local_backend.h"

namespace ddp::backends {
namespace {

class SingleRankBackend : public LocalBackend {
 public:
  SingleRankBackend(const std::string& name, std::chrono::milliseconds timeout)
      : LocalBackend(/*rank=*/0, /*size=*/1, name, timeout) {}

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    check_reduction(o.reduceOp);
    return done(OpType::ALLREDUCE, t);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& /*o*/) override {
    return done(OpType::_ALLREDUCE_SPARSE, t);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    check_reduction(o.reduceOp);
    return done(OpType::ALLREDUCE_COALESCED, t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    check_reduction(o.reduceOp);
    return done(OpType::REDUCE, t);
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& /*o*/) override {
    return copy_lists(OpType::ALLGATHER, to, from);
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& /*o*/) override {
    return copy(OpType::_ALLGATHER_BASE, to, from);
  }
  WorkPtr allgather_coalesced(
      TensorLists& to, Tensors& from, const c10d::AllgatherOptions& /*o*/) override {
    return copy_all(OpType::ALLGATHER_COALESCED, to.at(0), from);
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& /*o*/) override {
    return copy_all(OpType::ALLGATHER_COALESCED, to, from);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) override {
    check_reduction(o.reduceOp);
    return copy_all(OpType::COALESCED, to, from);
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& /*o*/) override {
    return copy_lists(OpType::GATHER, to, from);
  }
  WorkPtr scatter(Tensors& to, TensorLists& from, const c10d::ScatterOptions& /*o*/) override {
    return copy_lists(OpType::SCATTER, to, from);
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    check_reduction(o.reduceOp);
    return copy_lists(OpType::REDUCE_SCATTER, to, from);
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    check_reduction(o.reduceOp);
    return copy(OpType::_REDUCE_SCATTER_BASE, to, from);
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& /*o*/) override {
    return copy_all(OpType::ALLTOALL, to, from);
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t>& /*to_splits*/,
      std::vector<int64_t>& /*from_splits*/, const c10d::AllToAllOptions& /*o*/) override {
    return copy(OpType::ALLTOALL_BASE, to, from);
  }
  WorkPtr send(Tensors& /*t*/, int dst, int /*tag*/) override { refuse("send", dst); }
  WorkPtr recv(Tensors& /*t*/, int src, int /*tag*/) override { refuse("recv", src); }
  WorkPtr recvAnysource(Tensors& /*t*/, int /*tag*/) override { refuse("recv", -1); }

 private:
  static void check_reduction(const c10d::ReduceOp& op) {
    DDP_CHECK_VALUE(
        op.op_ != c10d::ReduceOp::PREMUL_SUM,
        "a group of one rank: expected another reduction than PREMUL_SUM. Multiply the tensor.");
  }
  static WorkPtr copy_all(OpType type, const Tensors& to, const Tensors& from) {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from.at(i).reshape(to[i].sizes()));
    return done(type, to);
  }
  static WorkPtr copy(OpType type, const at::Tensor& to, const at::Tensor& from) {
    return copy_all(type, {to}, {from});
  }
  static WorkPtr copy_lists(OpType type, const TensorLists& to, const Tensors& from) {
    return copy_all(type, to.at(0), from);
  }
  static WorkPtr copy_lists(OpType type, const Tensors& to, const TensorLists& from) {
    return copy_all(type, to, from.at(0));
  }
  [[noreturn]] static void refuse(const char* call, int peer) {
    throw readable_error<c10::ValueError>(
        DDP_HERE, ddp::str(
                      call, ": expected another rank of the group, got rank ", peer,
                      " in a group of one rank. Copy the tensor."));
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_single_rank_backend(
    const std::string& name, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SingleRankBackend>(name, timeout);
}

}  // namespace ddp::backends
