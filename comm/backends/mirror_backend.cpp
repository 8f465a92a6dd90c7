#include "backends/mirror_backend.h"

#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ddp/internal/c10d_names.h>
#include <ddp/internal/check.h>

#include "backends/completed_work.h"

namespace ddp::backends {
namespace {

using c10d::OpType;
using c10d::ReduceOp;
using MirrorTensors = std::vector<at::Tensor>;
using MirrorLists = std::vector<MirrorTensors>;
using MirrorWork = c10::intrusive_ptr<c10d::Work>;

class MirrorBackend : public c10d::Backend {
 public:
  MirrorBackend(int rank, int size, std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), options_(c10::make_intrusive<Options>(kMirror, timeout)) {}

  const std::string getBackendName() const override { return kMirror; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override {}
  void abort() override {}

  MirrorWork broadcast(MirrorTensors& t, const c10d::BroadcastOptions& /*o*/) override {
    return done(OpType::BROADCAST, t);
  }
  MirrorWork allreduce(MirrorTensors& t, const c10d::AllreduceOptions& o) override {
    for (auto& tensor : t) reduce_in_place(tensor, o.reduceOp);
    return done(OpType::ALLREDUCE, t);
  }
  MirrorWork allreduce_sparse(MirrorTensors& t, const c10d::AllreduceOptions& o) override {
    return allreduce(t, o);
  }
  MirrorWork allreduce_coalesced(
      MirrorTensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return allreduce(t, o);
  }
  MirrorWork reduce(MirrorTensors& t, const c10d::ReduceOptions& o) override {
    for (auto& tensor : t) reduce_in_place(tensor, o.reduceOp);
    return done(OpType::REDUCE, t);
  }
  MirrorWork allgather(
      MirrorLists& to, MirrorTensors& from, const c10d::AllgatherOptions& /*o*/) override {
    return fill_lists(OpType::ALLGATHER, to, from);
  }
  MirrorWork DDP_ALL_GATHER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& /*o*/) override {
    repeat(to, from);
    return done(OpType::_ALLGATHER_BASE, {to});
  }
  MirrorWork allgather_into_tensor_coalesced(
      MirrorTensors& to, MirrorTensors& from, const c10d::AllgatherOptions& /*o*/) override {
    for (size_t i = 0; i < to.size(); ++i) repeat(to[i], from.at(i));
    return done(OpType::ALLGATHER_COALESCED, to);
  }
  MirrorWork gather(
      MirrorLists& to, MirrorTensors& from, const c10d::GatherOptions& /*o*/) override {
    return fill_lists(OpType::GATHER, to, from);
  }
  MirrorWork scatter(
      MirrorTensors& /*to*/, MirrorLists& /*from*/, const c10d::ScatterOptions& /*o*/) override {
    refuse("scatter");
  }
  MirrorWork reduce_scatter(
      MirrorTensors& to, MirrorLists& from, const c10d::ReduceScatterOptions& o) override {
    for (size_t i = 0; i < to.size(); ++i) {
      overwrite(to[i], from.at(i).at(static_cast<size_t>(getRank())));
      reduce_in_place(to[i], o.reduceOp);
    }
    return done(OpType::REDUCE_SCATTER, to);
  }
  MirrorWork DDP_REDUCE_SCATTER_SINGLE(
      at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) override {
    overwrite(to, own_part(from));
    reduce_in_place(to, o.reduceOp);
    return done(OpType::_REDUCE_SCATTER_BASE, {to});
  }
  MirrorWork alltoall(
      MirrorTensors& to, MirrorTensors& from, const c10d::AllToAllOptions& /*o*/) override {
    for (auto& tensor : to) overwrite(tensor, from.at(static_cast<size_t>(getRank())));
    return done(OpType::ALLTOALL, to);
  }
  MirrorWork DDP_ALL_TO_ALL_SINGLE(
      at::Tensor& to, at::Tensor& from, std::vector<int64_t>& /*to_splits*/,
      std::vector<int64_t>& from_splits, const c10d::AllToAllOptions& /*o*/) override {
    if (!from_splits.empty()) refuse("all_to_all_single of unequal parts");
    repeat(to, own_part(from));
    return done(OpType::ALLTOALL_BASE, {to});
  }
  MirrorWork barrier(const c10d::BarrierOptions& /*o*/) override {
    return done(OpType::BARRIER, {});
  }
  void monitoredBarrier(const c10d::BarrierOptions& /*o*/, bool /*wait_all_ranks*/) override {}
  MirrorWork send(MirrorTensors& /*t*/, int /*dst*/, int /*tag*/) override { refuse("send"); }
  MirrorWork recv(MirrorTensors& /*t*/, int /*src*/, int /*tag*/) override { refuse("recv"); }
  MirrorWork recvAnysource(MirrorTensors& /*t*/, int /*tag*/) override { refuse("recv"); }

 private:
  static MirrorWork done(OpType type, MirrorTensors outputs) {
    return c10::make_intrusive<CompletedWork>(type, std::move(outputs));
  }

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
  static MirrorWork fill_lists(OpType type, MirrorLists& to, const MirrorTensors& from) {
    MirrorTensors outputs;
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

  const c10::intrusive_ptr<Options> options_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_mirror_backend(
    int rank, int size, std::chrono::milliseconds timeout) {
  return c10::make_intrusive<MirrorBackend>(rank, size, timeout);
}

}  // namespace ddp::backends
