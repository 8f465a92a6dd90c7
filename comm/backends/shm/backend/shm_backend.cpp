#include "shm_backend.h"

#include <utility>

#include <ATen/ops/empty_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

#include "../memory/exchanged_tensors.h"
#include "../memory/shared_tensors.h"
#include "../memory/tensors.h"
#include "backends/message_check.h"
#include "reduce.h"
#include "shm_work.h"
#include "work/collective_handle.h"

namespace ddp::backends::shm {

namespace {

bool are_plain(const Collective& c) {
  const auto fits = [dtype = c.first().scalar_type()](const at::Tensor& t) {
    return !t.defined() || (is_plain(t) && t.scalar_type() == dtype);
  };
  return fits(c.whole_in) && fits(c.whole_out) && all_of(c.in, fits) && all_of(c.out, fits);
}

/// Copies tensors of one size to the arena, one after the other.
at::Tensor joined_in_arena(const std::vector<at::Tensor>& tensors, Arena& arena) {
  const int64_t numel = tensors[0].numel();
  const auto count = static_cast<int64_t>(tensors.size());
  auto memory = arena.allocate(numel * count, tensors[0].scalar_type(), Arena::OnRelease::kKeep);
  for (int64_t i = 0; i < count; ++i) {
    assign(memory.narrow(0, i * numel, numel), flat(tensors[static_cast<size_t>(i)]));
  }
  return memory;
}

}  // namespace

ShmBackend::ShmBackend(
    int rank, int world_size, std::shared_ptr<HostMemory> memory,
    std::shared_ptr<ProgressEngine> engine, std::shared_ptr<GlooCarrier> gloo)
    : FallbackBackend(rank, world_size, std::move(memory), std::move(gloo)),
      engine_(std::move(engine)) {}

ShmBackend::~ShmBackend() { engine_->close(); }

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return FallbackBackend::getSequenceNumberForGroup() + engine_->announced();
}

void ShmBackend::setTimeout(std::chrono::milliseconds timeout) {
  FallbackBackend::setTimeout(timeout);
  engine_->set_timeout(timeout);
}

void ShmBackend::shutdown() {
  engine_->close();
  FallbackBackend::shutdown();
}

void ShmBackend::abort() {
  engine_->fail(kGroupAborted);
  FallbackBackend::abort();
}

ShmBackend::WorkPtr ShmBackend::start(Call call, OpType type, const char* title, Tensors outputs) {
  auto work =
      c10::make_intrusive<ShmWork>(Engines{engine_}, rank_, type, title, std::move(outputs));
  work->start(std::move(call));
  return work;
}

ShmBackend::WorkPtr ShmBackend::abort_on_error(
    const char* name, c10::function_ref<WorkPtr()> start_collective) {
  engine_->check_owner();  // before the arena, whose lock a thread of the rank may hold for ever
  try {
    return start_collective();
  } catch (const std::exception& error) {
    engine_->fail(why_not_started(name, rank_, size_, error));
    throw;
  }
}

// The engine also announces collectives that Gloo carries, before Gloo starts them, so that ranks
// that call something else see the mismatch at once. Gloo numbers collectives by each rank's calls,
// so it is unusable after a mismatch: the call that this rank has started there would time out.
ShmBackend::WorkPtr ShmBackend::fall_back(Collective c) {
  Call call;
  call.timeout = c.timeout;
  call.descriptor.kind = c.kind;
  call.descriptor.carrier = Carrier::kGloo;
  call.descriptor.dtype = static_cast<int32_t>(c.first().scalar_type());
  auto announced = start(std::move(call), c.type, "shm:announced", {});
  if (announced->isCompleted() && announced->exception()) return announced;
  auto results = c.results();
  const auto work = abort_on_error(
      "a collective through Gloo", [&] { return FallbackBackend::run(std::move(c)); });
  announced->getFuture()->addCallback(
      [gloo = shared_gloo()](c10::ivalue::Future& announced_by_all) {
        if (!announced_by_all.hasError()) return;
        if (text_of(announced_by_all.exception_ptr()) != kGroupDestroyed) gloo->abort();
      });
  return combine_works({announced, work}, std::move(results));
}

void ShmBackend::refused(Kind kind, const std::exception& error) {
  engine_->fail(why_not_started(to_text(kind), rank_, size_, error));
}

ShmBackend::WorkPtr ShmBackend::run(Collective c) {
  if (c.kind == Kind::Barrier) return run_barrier(c);
  const bool reduces =
      c.kind == Kind::AllReduce || c.kind == Kind::Reduce || c.kind == Kind::ReduceScatter;
  const bool is_list_alone = c.type == c10d::OpType::ALLREDUCE && c.in.size() > 1;
  const bool is_ours = are_plain(c) && !is_list_alone &&
                       (!reduces || can_reduce(c.out[0].scalar_type(), c.op)) &&
                       (c.type != c10d::OpType::REDUCE_SCATTER || are_like(c.in, c.out[0]));
  if (!is_ours) return fall_back(std::move(c));
  return abort_on_error(to_text(c.kind), [&] { return run_in_memory(c); });
}

ShmBackend::WorkPtr ShmBackend::run_in_memory(const Collective& c) {
  switch (c.kind) {
    case Kind::AllReduce:
      return all_reduce(c);
    case Kind::Broadcast:
      return broadcast_from_root(c);
    case Kind::Reduce:
      return reduce_to_root(c);
    case Kind::AllGather:
      return gather_all(c);
    case Kind::Gather:
      return gather_to_root(c);
    case Kind::Scatter:
      return scatter_from_root(c);
    case Kind::ReduceScatter:
      return reduce_parts(c);
    default:
      return exchange(c);
  }
}

ShmBackend::WorkPtr ShmBackend::start(Call call, const Collective& c, const char* title) {
  call.timeout = c.timeout;
  if (c.root >= 0) call.descriptor.root = c.root;
  return start(std::move(call), c.type, title, c.results());
}

ShmBackend::WorkPtr ShmBackend::all_reduce(const Collective& c) {
  const auto shared = std::make_shared<SharedTensors>(c.in, *arena_, rank_, size_);
  Call call;
  call.memory = shared;
  call.descriptor = shared->descriptor();
  call.descriptor.reduction = c.op.op_;
  call.reduce_step = [shared, type = c.in[0].scalar_type(), op = c.op](const auto& buffers) {
    shared->for_each_part_of_own_share(buffers, [&](const SharedTensors::Part& part) {
      reduce_elements(type, op, as_sources(part.places), part.places, part.begin, part.end);
    });
  };
  call.copy_out = [shared] { shared->copy_out(); };
  return start(std::move(call), c, "shm:all_reduce");
}

ShmBackend::WorkPtr ShmBackend::broadcast_from_root(const Collective& c) {
  Call call;
  const auto& tensor = c.in[0];
  // No rank reads the memory of a rank that receives, so its tensor need not be shared.
  const auto memory = c.root == rank_ ? shared(tensor, *arena_) : tensor;
  if (c.root == rank_) call.keep(memory);
  call.descriptor = describe(Kind::Broadcast, memory, *arena_);
  if (c.root != rank_) {
    call.reduce_step = [tensor, root = c.root](const auto& buffers) {
      assign(tensor, at_buffer(buffers[static_cast<size_t>(root)], tensor));
    };
  }
  return start(std::move(call), c, "shm:broadcast");
}

// Each rank reduces its share into the root's memory.
ShmBackend::WorkPtr ShmBackend::reduce_to_root(const Collective& c) {
  const auto& tensor = c.in[0];
  const auto memory = shared(tensor, *arena_);
  Call call;
  call.keep(memory);
  call.descriptor = describe(Kind::Reduce, memory, *arena_);
  call.descriptor.reduction = c.op.op_;
  const auto numel = static_cast<size_t>(memory.numel());
  call.reduce_step = [root = c.root, type = memory.scalar_type(), op = c.op,
                      begin = share_begin(numel, rank_, size_),
                      end = share_begin(numel, rank_ + 1, size_)](const auto& buffers) {
    reduce_elements(
        type, op, as_sources(buffers), {buffers[static_cast<size_t>(root)]}, begin, end);
  };
  if (c.root == rank_) call.copy_out = [tensor, memory] { assign(tensor, memory); };
  return start(std::move(call), c, "shm:reduce");
}

ShmBackend::WorkPtr ShmBackend::gather_to_root(const Collective& c) {
  const auto& input = c.in[0];
  // No rank reads the memory of the root.
  const auto memory = c.root == rank_ ? input : shared(input, *arena_);
  Call call;
  if (c.root != rank_) call.keep(memory);
  call.descriptor = describe(Kind::Gather, memory, *arena_);
  call.reduce_step = [outputs = c.out, input, root = c.root](const auto& buffers) {
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const bool own = static_cast<int>(rank) == root;
      assign(outputs[rank], own ? input : at_buffer(buffers[rank], input));
    }
  };
  return start(std::move(call), c, "shm:gather");
}

ShmBackend::WorkPtr ShmBackend::scatter_from_root(const Collective& c) {
  Call call;
  const auto& output = c.out[0];
  auto memory = output;  // of the root: what it sends to each rank
  if (c.root == rank_) {
    memory = joined_in_arena(c.in, *arena_);
    call.keep(memory);
  }
  call.descriptor = describe(Kind::Scatter, memory, *arena_);
  call.descriptor.numel = static_cast<uint64_t>(output.numel());
  call.reduce_step = [output, root = c.root,
                      offset = rank_ * output.nbytes()](const auto& buffers) {
    assign(output, at_buffer(buffers[static_cast<size_t>(root)] + offset, output));
  };
  return start(std::move(call), c, "shm:scatter");
}

ShmBackend::WorkPtr ShmBackend::gather_all(const Collective& c) {
  const auto memory = shared(c.in[0], *arena_);
  Call call;
  call.keep(memory);
  call.descriptor = describe(Kind::AllGather, memory, *arena_);
  call.reduce_step = [outputs = c.outputs(), memory](const auto& buffers) {
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      assign(outputs[rank], at_buffer(buffers[rank], memory));
    }
  };
  return start(std::move(call), c, "shm:all_gather");
}

ShmBackend::WorkPtr ShmBackend::reduce_parts(const Collective& c) {
  const auto& output = c.out[0];
  const auto memory =
      c.whole_in.defined() ? shared(c.whole_in, *arena_) : joined_in_arena(c.in, *arena_);
  Call call;
  call.keep(memory);
  call.descriptor = describe(Kind::ReduceScatter, memory, *arena_);
  call.descriptor.reduction = c.op.op_;
  const auto result =
      output.is_contiguous() ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  const auto numel = static_cast<size_t>(output.numel());
  const size_t begin = numel * static_cast<size_t>(rank_);
  call.reduce_step = [=, op = c.op](const auto& buffers) {
    // reduce_elements() writes to the indices that it reads, which begin at this rank's share.
    auto* whole = bytes_of(result) - begin * result.element_size();
    reduce_elements(result.scalar_type(), op, as_sources(buffers), {whole}, begin, begin + numel);
  };
  call.copy_out = [output, result] { assign(output, result); };
  return start(std::move(call), c, "shm:reduce_scatter");
}

ShmBackend::WorkPtr ShmBackend::exchange(const Collective& c) {
  const auto exchanged =
      std::make_shared<ExchangedTensors>(c.outputs(), c.inputs(), *arena_, rank_);
  Call call;
  call.memory = exchanged;
  call.descriptor = exchanged->descriptor();
  call.check_agreement = [exchanged](const auto& buffers) {
    return exchanged->compare_tables(buffers);
  };
  call.reduce_step = [exchanged](const auto& buffers) { exchanged->exchange(buffers); };
  call.copy_out = [exchanged] { exchanged->copy_out(); };
  return start(std::move(call), c, "shm:all_to_all");
}

// Completes after the calls that Gloo carries, too, as Gloo's own barrier does.
ShmBackend::WorkPtr ShmBackend::run_barrier(const Collective& c) {
  auto barrier = start(Call(), c, "shm:barrier");
  if (!reset_used_gloo()) return barrier;
  return combine_works({barrier, FallbackBackend::run(c)});
}

void ShmBackend::check_peer(const char* call, int rank) const {
  DDP_CHECK_VALUE(
      rank >= 0 && rank < size_, call, ": expected a rank of the group, 0 to ", size_ - 1, ", got ",
      rank, " on rank ", rank_, ".");
}

ShmBackend::WorkPtr ShmBackend::send(Tensors& tensors, int dst, int tag) {
  check_message("send", tensors, tag);
  check_peer("send", dst);
  return MessageWork::send(engine_, tensors[0], dst, tag);
}

ShmBackend::WorkPtr ShmBackend::recv(Tensors& tensors, int src, int tag) {
  check_message("recv", tensors, tag);
  check_peer("recv", src);
  return MessageWork::receive(engine_, tensors[0], src, tag);
}

ShmBackend::WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  check_message("recv", tensors, tag);
  return MessageWork::receive(engine_, tensors[0], Message::kAny, tag);
}

}  // namespace ddp::backends::shm
