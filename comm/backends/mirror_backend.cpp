#include "backends/mirror_backend.h"

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/c10d_names.h>
#include <ddp/internal/check.h>

#include "backends/local_backend.h"

namespace ddp::backends {
namespace {

using c10d::ReduceOp;

class MirrorBackend : public LocalBackend {
 public:
  MirrorBackend(int rank, int size, std::chrono::milliseconds timeout)
      : LocalBackend(rank, size, kMirror, timeout) {}

  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    for (auto& tensor : t) reduce_in_place(tensor, o.reduceOp);
    return done(OpType::ALLREDUCE, t);
  }
  WorkPtr allreduce_sparse(Tensors& t, const c10d::AllreduceOptions& o) override {
    return allreduce(t, o);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return allreduce(t, o);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    for (auto& tensor : t) reduce_in_place(tensor, o.reduceOp);
    return done(OpType::REDUCE, t);
  }
  WorkPtr allgather(TensorLists& to, Tensors& from, const c10d::AllgatherOptions& /*o*/) override {
    return fill_lists(OpType::ALLGATHER, to, from);
  }
  WorkPtr DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& /*o*/) override {
    repeat(to, from);
    return done(OpType::_ALLGATHER_BASE, {to});
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& to, Tensors& from, const c10d::AllgatherOptions& /*o*/) override {
    for (size_t i = 0; i < to.size(); ++i) repeat(to[i], from.at(i));
    return done(OpType::ALLGATHER_COALESCED, to);
  }
  WorkPtr gather(TensorLists& to, Tensors& from, const c10d::GatherOptions& /*o*/) override {
    return fill_lists(OpType::GATHER, to, from);
  }
  WorkPtr scatter(
      Tensors& /*to*/, TensorLists& /*from*/, const c10d::ScatterOptions& /*o*/) override {
    refuse("scatter");
  }
  WorkPtr reduce_scatter(
      Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < to.size(); ++i) {
      overwrite(to[i], from.at(i).at(static_cast<size_t>(getRank())));
      reduce_in_place(to[i], o.reduceOp);
    }
    return done(OpType::REDUCE_SCATTER, to);
  }
  WorkPtr DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    overwrite(to, own_part(from));
    reduce_in_place(to, o.reduceOp);
    return done(OpType::_REDUCE_SCATTER_BASE, {to});
  }
  WorkPtr alltoall(Tensors& to, Tensors& from, const c10d::AllToAllOptions& /*o*/) override {
    for (auto& tensor : to) overwrite(tensor, from.at(static_cast<size_t>(getRank())));
    return done(OpType::ALLTOALL, to);
  }
  WorkPtr DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t>& /*to_splits*/,
      std::vector<int64_t>& from_splits, const c10d::AllToAllOptions& /*o*/) override {
    if (!from_splits.empty()) refuse("all_to_all_single of unequal parts");
    repeat(to, own_part(from));
    return done(OpType::ALLTOALL_BASE, {to});
  }
  WorkPtr send(Tensors& /*t*/, int /*dst*/, int /*tag*/) override { refuse("send"); }
  WorkPtr recv(Tensors& /*t*/, int /*src*/, int /*tag*/) override { refuse("recv"); }
  WorkPtr recvAnysource(Tensors& /*t*/, int /*tag*/) override { refuse("recv"); }

 private:
  /// What `size` equal values give together.
  void reduce_in_place(at::Tensor& tensor, const ReduceOp& op) const {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    switch (op.op_) {
      case ReduceOp::SUM:
        if (tensor.scalar_type() != at::kBool) tensor.mul_(getSize());
        return;
      case ReduceOp::PRODUCT:
        if (tensor.scalar_type() != at::kBool) tensor.pow_(getSize());
        return;
      case ReduceOp::BXOR:
        if (getSize() % 2 == 0) tensor.zero_();
        return;
      case ReduceOp::PREMUL_SUM:
        refuse("PREMUL_SUM");
      default:  // the average, the least, ...: the value itself
        return;
    }
  }
  static void overwrite(at::Tensor& to, const at::Tensor& from) {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.copy_(from.reshape(to.sizes()));
  }
  void repeat(at::Tensor& to, const at::Tensor& from) const {
    const at::AutoDispatchBelowADInplaceOrView without_autograd;
    to.view({getSize(), -1}).copy_(from.reshape({1, -1}).expand({getSize(), from.numel()}));
  }
  at::Tensor own_part(const at::Tensor& from) const {
    return from.view({getSize(), -1}).select(0, getRank());
  }
  static WorkPtr fill_lists(OpType type, TensorLists& to, const Tensors& from) {
    Tensors outputs;
    for (size_t i = 0; i < to.size(); ++i) {
      for (auto& tensor : to[i]) {
        overwrite(tensor, from.at(i));
        outputs.push_back(tensor);
      }
    }
    return done(type, std::move(outputs));
  }
  [[noreturn]] static void refuse(const char* call) {
    throw readable_error<c10::Error>(
        DDP_HERE,
        ddp::str(
            call,
            ": expected a group of ranks that train, got a process that waits to join them. "
            "Call it inside of Elastic::loop(), or in Elastic::on_change()."));
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_mirror_backend(
    int rank, int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<MirrorBackend>(rank, size, timeout);
}

}  // namespace ddp::backends
