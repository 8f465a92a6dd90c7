#include "backends/mpi/mpi_backend.h"

#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/check.h>

#include "backends/message_check.h"
#include "backends/shm/backend/reduce.h"
#include "backends/shm/memory/tensors.h"
#include "calls/collective_call.h"
#include "work/collective_handle.h"

namespace ddp::backends::mpi {
namespace {

using c10d::OpType;
using Kind = CollectiveKind;
using Tensors = MpiBackend::Tensors;
using shm::assign;
using shm::bytes_of;

const char* title_of(Kind kind) {
  switch (kind) {
    case Kind::AllReduce:
      return "mpi:all_reduce";
    case Kind::Broadcast:
      return "mpi:broadcast";
    case Kind::AllGather:
      return "mpi:all_gather";
    case Kind::ReduceScatter:
      return "mpi:reduce_scatter";
    case Kind::Reduce:
      return "mpi:reduce";
    case Kind::Gather:
      return "mpi:gather";
    case Kind::Scatter:
      return "mpi:scatter";
    case Kind::AllToAll:
      return "mpi:all_to_all";
    default:
      return "mpi:barrier";
  }
}

void check_tensors(const char* call, at::ArrayRef<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    DDP_CHECK_VALUE(
        shm::is_plain(tensor), "mpi: ", call, ": expected dense tensors of the CPU, got ",
        tensor.layout(), " on ", tensor.device(),
        ". Move it, or choose backends as in \"cpu:mpi,cuda:nccl\".");
  }
}

void check_numel(const char* call, int64_t numel, int64_t expected) {
  DDP_CHECK_VALUE(
      numel == expected, "mpi: ", call, ": expected ", expected, " elements, got ", numel,
      ". Give tensors whose sizes fit the number of ranks.");
}

void check_reduction(const Collective& c) {
  for (const auto& tensor : c.inputs()) {
    DDP_CHECK_VALUE(
        shm::can_reduce(tensor.scalar_type(), c.op), "mpi: ", to_text(c.kind),
        ": expected a dtype and an operation that it can reduce, got ", to_text(c.op.op_), " of ",
        tensor.scalar_type(), ". Convert the tensor first.");
  }
}

/// Contiguous memory that holds what the tensor does: the tensor's own if it is contiguous.
at::Tensor memory_of(const at::Tensor& tensor) { return shm::flat(tensor); }

/// Copies back where memory_of() had to copy.
std::function<void()> copying_back(const at::Tensor& tensor, const at::Tensor& memory) {
  return [tensor, memory] {
    if (!tensor.is_contiguous()) assign(tensor, memory);
  };
}

}  // namespace

MpiBackend::MpiBackend(
    std::shared_ptr<Channel> channel, int most_tag, std::chrono::milliseconds timeout)
    : Uniform(channel->rank, channel->size),
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
    const Collective& c, c10::function_ref<OperationPtr(Tags)> make) {
  const auto described = c.described();
  const std::lock_guard lock(start_mutex_);
  auto operation = make(tags_of(described, started_));
  operation->number = started_++;
  return start(std::move(operation), c.type, title_of(c.kind), c.results(), c.timeout);
}

MpiBackend::WorkPtr MpiBackend::run(Collective c) {
  if (c.kind == Kind::AllReduce && c.in[0].is_sparse()) return reduce_sparse(c);
  const auto in = c.inputs(), out = c.outputs();
  check_tensors(to_text(c.kind), in);
  check_tensors(to_text(c.kind), out);
  const auto ranks = static_cast<size_t>(size_);
  Tensors of_root(ranks);
  switch (c.kind) {
    case Kind::Broadcast:
      return broadcast_from_root(c);
    case Kind::AllReduce:
      return all_reduce(c);
    case Kind::Reduce:
      return reduce_to_root(c);
    case Kind::ReduceScatter:
      return reduce_parts(c);
    case Kind::AllGather:
      return exchange(c, Tensors(ranks, memory_of(in[0])), out);
    case Kind::Gather:
      of_root[static_cast<size_t>(c.root)] = in[0];
      return exchange(c, of_root, out);
    case Kind::Scatter:
      of_root[static_cast<size_t>(c.root)] = out[0];
      return exchange(c, in, of_root);
    case Kind::AllToAll:
      return exchange(c, in, out);
    default: {
      const auto nothing = at::empty({0}, at::kByte);
      return exchange(c, Tensors(ranks, nothing), Tensors(ranks, nothing));
    }
  }
}

MpiBackend::WorkPtr MpiBackend::broadcast_from_root(const Collective& c) {
  const auto& tensor = c.in[0];
  const auto memory = memory_of(tensor);
  return start(c, [&](Tags tags) {
    return make_broadcast(
        {bytes_of(memory), memory.nbytes(), c.root, copying_back(tensor, memory)}, tags);
  });
}

MpiBackend::WorkPtr MpiBackend::reduce_sparse(const Collective& c) {
  const auto& tensor = c.in[0];
  DDP_CHECK_VALUE(
      c.in.size() == 1 && tensor.device().is_cpu(),
      "mpi: all_reduce: expected one sparse tensor of the CPU, got ", c.in.size(), " on ",
      tensor.device(), ". Move it, or choose backends as in \"cpu:mpi,cuda:nccl\".");
  DDP_CHECK_VALUE(
      c.op.op_ == c10d::ReduceOp::SUM, "mpi: all_reduce: expected SUM of sparse tensors, got ",
      to_text(c.op.op_), ". Convert them by to_dense() first.");
  return start(c, [&](Tags tags) { return make_sparse_reduction(tensor, tags); });
}

MpiBackend::WorkPtr MpiBackend::all_reduce(const Collective& c) {
  check_reduction(c);
  std::vector<WorkPtr> works;
  for (const auto& tensor : c.in) {
    const auto memory = memory_of(tensor);
    auto* const bytes = bytes_of(memory);
    ReductionPlan plan{tensor.scalar_type(),        c.op, bytes, {}, bytes, bytes,
                       copying_back(tensor, memory)};
    for (int rank = 0; rank <= size_; ++rank) {
      plan.begins.push_back(shm::share_begin(static_cast<size_t>(memory.numel()), rank, size_));
    }
    plan.sums = bytes + plan.begins[static_cast<size_t>(rank_)] * tensor.element_size();
    works.push_back(start(c, [&](Tags tags) { return make_reduction(std::move(plan), tags); }));
  }
  return works.size() == 1 ? works[0] : combine_works(std::move(works), c.results());
}

MpiBackend::WorkPtr MpiBackend::reduce_to_root(const Collective& c) {
  check_reduction(c);
  const auto& tensor = c.in[0];
  const auto memory = memory_of(tensor);
  auto* const bytes = bytes_of(memory);
  // All elements are the root's share.
  ReductionPlan plan{tensor.scalar_type(), c.op, bytes, {}, bytes, nullptr, {}};
  for (int rank = 0; rank <= size_; ++rank) {
    plan.begins.push_back(rank > c.root ? static_cast<size_t>(memory.numel()) : 0);
  }
  plan.finish = [copy_back = copying_back(tensor, memory), is_root = rank_ == c.root, memory] {
    if (is_root) copy_back();
  };
  return start(c, [&](Tags tags) { return make_reduction(std::move(plan), tags); });
}

MpiBackend::WorkPtr MpiBackend::reduce_parts(const Collective& c) {
  check_reduction(c);
  const auto& to = c.out[0];
  auto input = c.whole_in;
  if (!input.defined()) {
    Tensors parts;
    for (const auto& part : c.in) {
      check_numel("reduce_scatter", part.numel(), to.numel());
      parts.push_back(shm::flat(part));
    }
    input = at::cat(parts);
  }
  const auto output = to.is_contiguous() ? to : at::empty({to.numel()}, to.options());
  ReductionPlan plan{input.scalar_type(), c.op, bytes_of(input), {}, bytes_of(output), nullptr, {}};
  for (int rank = 0; rank <= size_; ++rank) {
    plan.begins.push_back(static_cast<size_t>(to.numel()) * static_cast<size_t>(rank));
  }
  plan.finish = [to, output, input] { assign(to, output); };
  return start(c, [&](Tags tags) { return make_reduction(std::move(plan), tags); });
}

MpiBackend::WorkPtr MpiBackend::exchange(
    const Collective& c, const Tensors& in, const Tensors& out) {
  ExchangePlan plan;
  Tensors kept;  // alive until the messages are over
  std::vector<std::function<void()>> finish;
  const auto own = static_cast<size_t>(rank_);
  for (size_t rank = 0; rank < in.size(); ++rank) {
    if (rank == own || !in[rank].defined()) continue;
    const auto memory = memory_of(in[rank]);
    kept.push_back(memory);
    plan.sent.push_back({bytes_of(memory), memory.nbytes(), static_cast<int>(rank)});
  }
  for (size_t rank = 0; rank < out.size(); ++rank) {
    if (rank == own || !out[rank].defined()) continue;
    const auto& output = out[rank];
    const auto memory =
        output.is_contiguous() ? output : at::empty({output.numel()}, output.options());
    kept.push_back(memory);
    plan.received.push_back({bytes_of(memory), memory.nbytes(), static_cast<int>(rank)});
    if (!output.is_contiguous()) finish.push_back(copying_back(output, memory));
  }
  const bool copies_own =
      own < out.size() && own < in.size() && out[own].defined() && in[own].defined();
  if (copies_own) {
    check_numel(to_text(c.kind), in[own].numel(), out[own].numel());
    assign(out[own], shm::flat(in[own]));
  }
  plan.finish = [kept = std::move(kept), finish = std::move(finish)] {
    for (const auto& step : finish) step();
  };
  return start(c, [&](Tags tags) { return make_exchange(std::move(plan), tags); });
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
