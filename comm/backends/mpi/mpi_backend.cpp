#include "backends/mpi/mpi_backend.h"

#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "backends/message_check.h"
#include "backends/mpi/operations/messages.h"
#include "backends/mpi/operations/reduction.h"
#include "backends/mpi/operations/sparse_reduction.h"
#include "backends/shm/backend/reduce.h"
#include "backends/shm/memory/tensors.h"
#include "work/composite_work.h"

namespace ddp::backends::mpi {
namespace {

using c10d::OpType;
using Kind = CollectiveKind;
using Tensors = MpiBackend::Tensors;
using shm::assign;
using shm::bytes_of;

void check_tensors(const char* call, at::ArrayRef<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    DDP_CHECK_VALUE(
        shm::is_plain(tensor), "mpi: ", call, ": expected dense tensors of the CPU, got ",
        tensor.layout(), " on ", tensor.device(),
        ". Move it, or choose backends as in \"cpu:mpi,cuda:nccl\".");
  }
}

void check_count(const char* call, size_t count, size_t expected) {
  DDP_CHECK_VALUE(
      count == expected, "mpi: ", call, ": expected ", expected, " tensor(s), got ", count,
      ". Give one for each rank, or one alone where only one is meant.");
}

void check_numel(const char* call, int64_t numel, int64_t expected) {
  DDP_CHECK_VALUE(
      numel == expected, "mpi: ", call, ": expected ", expected, " elements, got ", numel,
      ". Give tensors whose sizes fit the number of ranks.");
}

void check_reduction(const char* call, const c10d::ReduceOp& op, const at::Tensor& tensor) {
  check_tensors(call, tensor);
  DDP_CHECK_VALUE(
      shm::can_reduce(tensor.scalar_type(), op), "mpi: ", call,
      ": expected a dtype and an operation that it can reduce, got ", to_text(op.op_), " of ",
      tensor.scalar_type(), ". Convert the tensor first.");
}

/// Contiguous memory that holds what the tensor does: the tensor's own if it is contiguous.
at::Tensor memory_of(const at::Tensor& tensor) { return shm::flat(tensor); }

/// Copies back where memory_of() had to copy.
std::function<void()> copying_back(const at::Tensor& tensor, const at::Tensor& memory) {
  return [tensor, memory] {
    if (!tensor.is_contiguous()) assign(tensor, memory);
  };
}

std::vector<at::Tensor> equal_parts(const at::Tensor& tensor, int ranks) {
  const auto whole = shm::flat(tensor);
  const at::AutoDispatchBelowADInplaceOrView below;
  return whole.split_with_sizes(
      std::vector<int64_t>(static_cast<size_t>(ranks), whole.numel() / ranks));
}

}  // namespace

MpiBackend::MpiBackend(
    std::shared_ptr<Channel> channel, int most_tag, std::chrono::milliseconds timeout)
    : c10d::Backend(channel->rank, channel->size),
      channel_(std::move(channel)),
      most_tag_(most_tag),
      options_(c10::make_intrusive<Options>("mpi", timeout)) {}

MpiBackend::~MpiBackend() { MpiThread::instance().release(channel_); }

Tags MpiBackend::tags_of(const CollectiveCall& call, uint64_t number) const {
  constexpr int kBitsOfNumber = 8;
  uint64_t most_hash = static_cast<uint64_t>(most_tag_) >> (kBitsOfNumber + 1);
  // All ones: MPI's limit may have any value.
  while ((most_hash & (most_hash + 1)) != 0) most_hash >>= 1;
  const auto hash = (call.hash() >> 32) & most_hash;
  const auto base = ((hash << kBitsOfNumber) | (number & 0xff)) << 1;
  return {static_cast<int>(base), static_cast<int>(base | 1)};
}

MpiBackend::WorkPtr MpiBackend::start(
    OperationPtr operation, OpType type, const char* title, Tensors outputs,
    std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<MpiWork>(channel_, rank_, type, title, std::move(outputs));
  const bool is_unset = timeout == c10d::kUnsetTimeout;
  operation->channel = channel_;
  operation->work = work;
  operation->title = title;
  operation->deadline = Deadline::in(is_unset ? options_->timeout : timeout);
  channel_->add(work);
  MpiThread::instance().start(std::move(operation));
  return work;
}

MpiBackend::WorkPtr MpiBackend::start(
    const Call& call, c10::function_ref<OperationPtr(Tags)> make) {
  const std::lock_guard lock(start_mutex_);
  auto operation = make(tags_of(call.described, started_));
  operation->number = started_++;
  return start(std::move(operation), call.type, call.title, call.outputs, call.timeout);
}

MpiBackend::WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) {
  check_count("broadcast", tensors.size(), 1);
  check_tensors("broadcast", tensors);
  const auto& tensor = tensors[0];
  const auto memory = memory_of(tensor);
  const int root = static_cast<int>(o.rootRank);
  return start(
      {describe_call(Kind::kBroadcast, tensors, -1, root), OpType::BROADCAST, "mpi:broadcast",
       tensors, o.timeout},
      [&](Tags tags) {
        return make_broadcast(
            {bytes_of(memory), memory.nbytes(), root, copying_back(tensor, memory)}, tags);
      });
}

MpiBackend::WorkPtr MpiBackend::reduce_all(
    const Tensor& tensor, const c10d::ReduceOp& op, const CollectiveCall& described,
    std::chrono::milliseconds timeout) {
  const auto memory = memory_of(tensor);
  auto* const bytes = bytes_of(memory);
  ReductionPlan plan{tensor.scalar_type(),        op, bytes, {}, bytes, bytes,
                     copying_back(tensor, memory)};
  for (int rank = 0; rank <= size_; ++rank) {
    plan.begins.push_back(shm::share_begin(static_cast<size_t>(memory.numel()), rank, size_));
  }
  plan.sums = bytes + plan.begins[static_cast<size_t>(rank_)] * tensor.element_size();
  return start({described, OpType::ALLREDUCE, "mpi:all_reduce", {tensor}, timeout}, [&](Tags tags) {
    return make_reduction(std::move(plan), tags);
  });
}

MpiBackend::WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) {
  if (tensors.size() == 1 && tensors[0].is_sparse()) return allreduce_sparse(tensors, o);
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = o.reduceOp;
  options.timeout = o.timeout;
  return allreduce_coalesced(tensors, options);
}

MpiBackend::WorkPtr MpiBackend::allreduce_sparse(
    Tensors& tensors, const c10d::AllreduceOptions& o) {
  check_count("all_reduce", tensors.size(), 1);
  const auto& tensor = tensors[0];
  DDP_CHECK_VALUE(
      tensor.is_sparse() && tensor.device().is_cpu(),
      "mpi: all_reduce: expected a sparse tensor of the CPU, got ", tensor.layout(), " on ",
      tensor.device(), ". Move it, or choose backends as in \"cpu:mpi,cuda:nccl\".");
  DDP_CHECK_VALUE(
      o.reduceOp.op_ == c10d::ReduceOp::SUM,
      "mpi: all_reduce: expected SUM of sparse tensors, got ", to_text(o.reduceOp.op_),
      ". Convert them by to_dense() first.");
  return start(
      {describe_call(Kind::kAllReduce, tensors, o.reduceOp.op_), OpType::_ALLREDUCE_SPARSE,
       "mpi:all_reduce", tensors, o.timeout},
      [&](Tags tags) { return make_sparse_reduction(tensor, tags); });
}

MpiBackend::WorkPtr MpiBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) {
  for (const auto& tensor : tensors) check_reduction("all_reduce", o.reduceOp, tensor);
  const auto described = describe_call(Kind::kAllReduce, tensors, o.reduceOp.op_);
  std::vector<WorkPtr> works;
  for (const auto& tensor : tensors) {
    works.push_back(reduce_all(tensor, o.reduceOp, described, o.timeout));
  }
  return works.size() == 1 ? works[0] : combine_works(std::move(works), tensors);
}

MpiBackend::WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& o) {
  check_count("reduce", tensors.size(), 1);
  check_reduction("reduce", o.reduceOp, tensors[0]);
  const auto& tensor = tensors[0];
  const auto memory = memory_of(tensor);
  auto* const bytes = bytes_of(memory);
  const int root = static_cast<int>(o.rootRank);
  // All elements are the root's share.
  ReductionPlan plan{tensor.scalar_type(), o.reduceOp, bytes, {}, bytes, nullptr, {}};
  for (int rank = 0; rank <= size_; ++rank) {
    plan.begins.push_back(rank > root ? static_cast<size_t>(memory.numel()) : 0);
  }
  plan.finish = [copy_back = copying_back(tensor, memory), is_root = rank_ == root, memory] {
    if (is_root) copy_back();
  };
  return start(
      {describe_call(Kind::kReduce, tensors, o.reduceOp.op_, root), OpType::REDUCE, "mpi:reduce",
       tensors, o.timeout},
      [&](Tags tags) { return make_reduction(std::move(plan), tags); });
}

MpiBackend::WorkPtr MpiBackend::reduce_parts(
    const Tensor& to, const Tensor& from, const CollectiveCall& described,
    const c10d::ReduceScatterOptions& o) {
  const auto input = memory_of(from);
  const auto output = to.is_contiguous() ? to : at::empty({to.numel()}, to.options());
  ReductionPlan plan{
      from.scalar_type(), o.reduceOp, bytes_of(input), {}, bytes_of(output), nullptr, {}};
  for (int rank = 0; rank <= size_; ++rank) {
    plan.begins.push_back(static_cast<size_t>(to.numel()) * static_cast<size_t>(rank));
  }
  plan.finish = [to, output, input] { assign(to, output); };
  return start(
      {described, OpType::REDUCE_SCATTER, "mpi:reduce_scatter", {to}, o.timeout},
      [&](Tags tags) { return make_reduction(std::move(plan), tags); });
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter(
    Tensors& to, TensorLists& from, const c10d::ReduceScatterOptions& o) {
  check_count("reduce_scatter", to.size(), 1);
  check_count("reduce_scatter", from.size(), 1);
  check_count("reduce_scatter", from[0].size(), static_cast<size_t>(size_));
  Tensors parts;
  for (const auto& part : from[0]) {
    check_reduction("reduce_scatter", o.reduceOp, part);
    check_numel("reduce_scatter", part.numel(), to[0].numel());
    parts.push_back(shm::flat(part));
  }
  return reduce_parts(
      to[0], at::cat(parts), describe_call(Kind::kReduceScatter, from[0], o.reduceOp.op_), o);
}

MpiBackend::WorkPtr MpiBackend::DDP_REDUCE_SCATTER_SINGLE(
    Tensor& to, Tensor& from, const c10d::ReduceScatterOptions& o) {
  Tensors outputs{to};
  Tensors inputs{from};
  return reduce_scatter_tensor_coalesced(outputs, inputs, o);
}

MpiBackend::WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(
    Tensors& to, Tensors& from, const c10d::ReduceScatterOptions& o) {
  check_count("reduce_scatter", from.size(), to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    check_reduction("reduce_scatter", o.reduceOp, from[i]);
    check_numel("reduce_scatter", from[i].numel(), to[i].numel() * size_);
  }
  const auto described = describe_call(Kind::kReduceScatter, from, o.reduceOp.op_);
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < to.size(); ++i) {
    works.push_back(reduce_parts(to[i], from[i], described, o));
  }
  return works.size() == 1 ? works[0] : combine_works(std::move(works), to);
}

MpiBackend::WorkPtr MpiBackend::exchange(const Call& call, const Tensors& to, const Tensors& from) {
  check_tensors(call.title, call.outputs);
  ExchangePlan plan;
  Tensors kept;  // alive until the messages are over
  std::vector<std::function<void()>> finish;
  const auto own = static_cast<size_t>(rank_);
  for (size_t rank = 0; rank < from.size(); ++rank) {
    if (rank == own || !from[rank].defined()) continue;
    const auto memory = memory_of(from[rank]);
    kept.push_back(memory);
    plan.sent.push_back({bytes_of(memory), memory.nbytes(), static_cast<int>(rank)});
  }
  for (size_t rank = 0; rank < to.size(); ++rank) {
    if (rank == own || !to[rank].defined()) continue;
    const auto& output = to[rank];
    const auto memory =
        output.is_contiguous() ? output : at::empty({output.numel()}, output.options());
    kept.push_back(memory);
    plan.received.push_back({bytes_of(memory), memory.nbytes(), static_cast<int>(rank)});
    if (!output.is_contiguous()) finish.push_back(copying_back(output, memory));
  }
  const bool copies_own =
      own < to.size() && own < from.size() && to[own].defined() && from[own].defined();
  if (copies_own) {
    check_numel(call.title, from[own].numel(), to[own].numel());
    assign(to[own], shm::flat(from[own]));
  }
  plan.finish = [kept = std::move(kept), finish = std::move(finish)] {
    for (const auto& step : finish) step();
  };
  return start(call, [&](Tags tags) { return make_exchange(std::move(plan), tags); });
}

MpiBackend::WorkPtr MpiBackend::allgather(
    TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) {
  check_count("all_gather", from.size(), 1);
  check_count("all_gather", to.size(), 1);
  check_count("all_gather", to[0].size(), static_cast<size_t>(size_));
  check_tensors("all_gather", from);
  for (const auto& output : to[0]) check_numel("all_gather", output.numel(), from[0].numel());
  return exchange(
      {describe_call(Kind::kAllGather, from), OpType::ALLGATHER, "mpi:all_gather", to[0],
       o.timeout},
      to[0], Tensors(static_cast<size_t>(size_), memory_of(from[0])));
}

MpiBackend::WorkPtr MpiBackend::DDP_ALL_GATHER_SINGLE(
    Tensor& to, Tensor& from, const c10d::AllgatherOptions& o) {
  Tensors outputs{to};
  Tensors inputs{from};
  return allgather_into_tensor_coalesced(outputs, inputs, o);
}

MpiBackend::WorkPtr MpiBackend::allgather_into_tensor_coalesced(
    Tensors& to, Tensors& from, const c10d::AllgatherOptions& o) {
  check_count("all_gather", to.size(), from.size());
  check_tensors("all_gather", from);
  check_tensors("all_gather", to);
  const auto described = describe_call(Kind::kAllGather, from);
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < to.size(); ++i) {
    check_numel("all_gather", to[i].numel(), from[i].numel() * size_);
    const auto memory = to[i].is_contiguous() ? to[i] : at::empty({to[i].numel()}, to[i].options());
    const auto work = exchange(
        {described, OpType::_ALLGATHER_BASE, "mpi:all_gather", {to[i]}, o.timeout},
        equal_parts(memory, size_), Tensors(static_cast<size_t>(size_), memory_of(from[i])));
    if (to[i].is_contiguous()) {
      works.push_back(work);
    } else {
      works.push_back(c10::make_intrusive<CompositeWork>(
          std::vector<WorkPtr>{work}, copying_back(to[i], memory), Tensors{to[i]}));
    }
  }
  return works.size() == 1 ? works[0] : combine_works(std::move(works), to);
}

MpiBackend::WorkPtr MpiBackend::allgather_coalesced(
    TensorLists& to, Tensors& from, const c10d::AllgatherOptions& o) {
  check_count("all_gather", to.size(), static_cast<size_t>(size_));
  std::vector<WorkPtr> works;
  Tensors outputs;
  for (size_t i = 0; i < from.size(); ++i) {
    TensorLists of_ranks(1);
    for (auto& list : to) {
      check_count("all_gather", list.size(), from.size());
      of_ranks[0].push_back(list[i]);
    }
    Tensors own{from[i]};
    works.push_back(allgather(of_ranks, own, o));
    outputs.insert(outputs.end(), of_ranks[0].begin(), of_ranks[0].end());
  }
  return combine_works(std::move(works), outputs);
}

MpiBackend::WorkPtr MpiBackend::gather(
    TensorLists& to, Tensors& from, const c10d::GatherOptions& o) {
  check_count("gather", from.size(), 1);
  check_tensors("gather", from);
  const int root = static_cast<int>(o.rootRank);
  Tensors outputs;
  Tensors inputs(static_cast<size_t>(size_));
  inputs[static_cast<size_t>(root)] = from[0];
  if (rank_ == root) {
    check_count("gather", to.size(), 1);
    check_count("gather", to[0].size(), static_cast<size_t>(size_));
    outputs = to[0];
    for (const auto& output : outputs) check_numel("gather", output.numel(), from[0].numel());
  }
  return exchange(
      {describe_call(Kind::kGather, from, -1, root), OpType::GATHER, "mpi:gather", outputs,
       o.timeout},
      outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::scatter(
    Tensors& to, TensorLists& from, const c10d::ScatterOptions& o) {
  check_count("scatter", to.size(), 1);
  const int root = static_cast<int>(o.rootRank);
  Tensors inputs;
  Tensors outputs(static_cast<size_t>(size_));
  outputs[static_cast<size_t>(root)] = to[0];
  if (rank_ == root) {
    check_count("scatter", from.size(), 1);
    check_count("scatter", from[0].size(), static_cast<size_t>(size_));
    check_tensors("scatter", from[0]);
    inputs = from[0];
    for (const auto& input : inputs) check_numel("scatter", input.numel(), to[0].numel());
  }
  return exchange(
      {describe_call(Kind::kScatter, to, -1, root), OpType::SCATTER, "mpi:scatter", to, o.timeout},
      outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::alltoall(
    Tensors& to, Tensors& from, const c10d::AllToAllOptions& o) {
  check_count("all_to_all", to.size(), static_cast<size_t>(size_));
  check_count("all_to_all", from.size(), static_cast<size_t>(size_));
  check_tensors("all_to_all", from);
  return exchange(
      {describe_call(Kind::kAllToAll, from), OpType::ALLTOALL, "mpi:all_to_all", to, o.timeout}, to,
      from);
}

MpiBackend::WorkPtr MpiBackend::DDP_ALL_TO_ALL_SINGLE(
    Tensor& to, Tensor& from, std::vector<int64_t>& to_splits, std::vector<int64_t>& from_splits,
    const c10d::AllToAllOptions& o) {
  check_tensors("all_to_all", {to, from});
  DDP_CHECK_VALUE(
      to.is_contiguous(),
      "mpi: all_to_all: expected a contiguous output, got one that is not. Call contiguous() "
      "first.");
  auto outputs = shm::parts_of(to, to_splits, size_);
  auto inputs = shm::parts_of(from, from_splits, size_);
  check_count("all_to_all", outputs.size(), static_cast<size_t>(size_));
  check_count("all_to_all", inputs.size(), static_cast<size_t>(size_));
  return exchange(
      {describe_call(Kind::kAllToAll, inputs),
       OpType::ALLTOALL_BASE,
       "mpi:all_to_all",
       {to},
       o.timeout},
      outputs, inputs);
}

MpiBackend::WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& o) {
  ExchangePlan plan;
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    plan.sent.push_back({nullptr, 0, rank});
    plan.received.push_back({nullptr, 0, rank});
  }
  return start(
      {describe_call(Kind::kBarrier, {}), OpType::BARRIER, "mpi:barrier", {}, o.timeout},
      [&](Tags tags) { return make_exchange(std::move(plan), tags); });
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& o, bool /*wait_all_ranks*/) {
  barrier(o)->wait();
}

void MpiBackend::check_message_of(
    const char* call, const Tensors& tensors, std::optional<int> peer, int tag) const {
  check_message(call, tensors, tag);
  check_tensors(call, tensors);
  DDP_CHECK_VALUE(
      tag <= most_tag_, call, ": expected a tag up to ", most_tag_, ", MPI's limit here, got ", tag,
      ". Use a smaller one.");
  DDP_CHECK_VALUE(
      !peer || (*peer >= 0 && *peer < size_ && *peer != rank_), call,
      ": expected another rank of the group, 0 to ", size_ - 1, ", got ", peer.value_or(-1),
      " on rank ", rank_, " of ", size_, ". Give one of them.");
}

MpiBackend::WorkPtr MpiBackend::send(Tensors& tensors, int dst, int tag) {
  check_message_of("send", tensors, dst, tag);
  return start(
      make_send(tensors[0], dst, tag), OpType::SEND, "mpi:send", tensors, c10d::kUnsetTimeout);
}

MpiBackend::WorkPtr MpiBackend::recv(Tensors& tensors, int src, int tag) {
  check_message_of("recv", tensors, src, tag);
  return start(
      make_receive(tensors[0], src, tag), OpType::RECV, "mpi:recv", tensors, c10d::kUnsetTimeout);
}

MpiBackend::WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  check_message_of("recv", tensors, std::nullopt, tag);
  return start(
      make_receive(tensors[0], std::nullopt, tag), OpType::RECVANYSOURCE, "mpi:recv", tensors,
      c10d::kUnsetTimeout);
}

}  // namespace ddp::backends::mpi
