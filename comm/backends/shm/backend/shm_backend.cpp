#include "shm_backend.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>

#include "../memory/exchanged_tensors.h"
#include "../memory/shared_tensors.h"
#include "../memory/tensors.h"
#include "backends/message_check.h"
#include "message_work.h"
#include "reduce.h"
#include "shm_work.h"
#include "work/composite_work.h"

namespace ddp::backends::shm {

using c10d::OpType;

namespace {

std::vector<at::Tensor> joined(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
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
ShmBackend::WorkPtr ShmBackend::fall_back(
    const GlooCall& given, c10::function_ref<WorkPtr()> start_gloo) {
  Call call;
  call.timeout = given.timeout;
  call.descriptor.kind = given.kind;
  call.descriptor.carrier = Carrier::kGloo;
  if (!given.tensors.empty()) {
    call.descriptor.dtype = static_cast<int32_t>(given.tensors[0].scalar_type());
  }
  auto announced = start(std::move(call), given.type, "shm:announced", {});
  if (announced->isCompleted() && announced->exception()) return announced;
  const auto work = abort_on_error("a collective through Gloo", start_gloo);
  announced->getFuture()->addCallback(
      [gloo = shared_gloo()](c10::ivalue::Future& announced_by_all) {
        if (!announced_by_all.hasError()) return;
        if (text_of(announced_by_all.exception_ptr()) != kGroupDestroyed) gloo->abort();
      });
  return combine_works({announced, work}, given.results);
}

ShmBackend::WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() != 1 || !is_plain(tensors[0]) ||
      !can_reduce(tensors[0].scalar_type(), options.reduceOp)) {
    return fall_back({Kind::kAllReduce, OpType::ALLREDUCE, tensors, tensors, options.timeout}, [&] {
      return FallbackBackend::allreduce(tensors, options);
    });
  }
  return reduce_all(tensors, options);
}

ShmBackend::WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (tensors.empty() || !are_plain(tensors) ||
      !can_reduce(tensors[0].scalar_type(), options.reduceOp)) {
    return fall_back({Kind::kAllReduce, OpType::ALLREDUCE, tensors, tensors, options.timeout}, [&] {
      return FallbackBackend::allreduce_coalesced(tensors, options);
    });
  }
  return reduce_all(tensors, options);
}

ShmBackend::WorkPtr ShmBackend::reduce_all(
    const Tensors& tensors, const c10d::AllreduceOptions& options) {
  return abort_on_error("all_reduce", [&] {
    const auto shared = std::make_shared<SharedTensors>(tensors, *arena_, rank_, size_);
    Call call;
    call.timeout = options.timeout;
    call.memory = shared;
    call.descriptor = shared->descriptor();
    call.descriptor.reduction = options.reduceOp.op_;
    call.reduce_step = [shared, type = tensors[0].scalar_type(),
                        op = options.reduceOp](const auto& buffers) {
      shared->for_each_part_of_own_share(buffers, [&](const SharedTensors::Part& part) {
        reduce_elements(type, op, as_sources(part.places), part.places, part.begin, part.end);
      });
    };
    call.copy_out = [shared] { shared->copy_out(); };
    return start(std::move(call), OpType::ALLREDUCE, "shm:all_reduce", tensors);
  });
}

ShmBackend::WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  if (tensors.size() != 1 || !is_plain(tensors[0]) || root < 0 || root >= size_) {
    return fall_back({Kind::kBroadcast, OpType::BROADCAST, tensors, tensors, options.timeout}, [&] {
      return FallbackBackend::broadcast(tensors, options);
    });
  }
  return abort_on_error("broadcast", [&] { return broadcast_from(root, tensors[0], options); });
}

ShmBackend::WorkPtr ShmBackend::broadcast_from(
    int root, const Tensor& tensor, const c10d::BroadcastOptions& options) {
  Call call;
  call.timeout = options.timeout;
  // No rank reads the memory of a rank that receives, so its tensor need not be shared.
  const auto memory = root == rank_ ? shared(tensor, *arena_) : tensor;
  if (root == rank_) call.keep(memory);
  call.descriptor = describe(Kind::kBroadcast, memory, *arena_);
  call.descriptor.root = root;
  if (root != rank_) {
    call.reduce_step = [tensor, root](const auto& buffers) {
      assign(tensor, at_buffer(buffers[static_cast<size_t>(root)], tensor));
    };
  }
  return start(std::move(call), OpType::BROADCAST, "shm:broadcast", {tensor});
}

ShmBackend::WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  if (tensors.size() != 1 || !is_plain(tensors[0]) || root < 0 || root >= size_ ||
      !can_reduce(tensors[0].scalar_type(), options.reduceOp)) {
    return fall_back({Kind::kReduce, OpType::REDUCE, tensors, tensors, options.timeout}, [&] {
      return FallbackBackend::reduce(tensors, options);
    });
  }
  return abort_on_error("reduce", [&] { return reduce_to(root, tensors[0], options); });
}

// Each rank reduces its share into the root's memory.
ShmBackend::WorkPtr ShmBackend::reduce_to(
    int root, const Tensor& tensor, const c10d::ReduceOptions& options) {
  const auto memory = shared(tensor, *arena_);
  Call call;
  call.timeout = options.timeout;
  call.keep(memory);
  call.descriptor = describe(Kind::kReduce, memory, *arena_);
  call.descriptor.root = root;
  call.descriptor.reduction = options.reduceOp.op_;
  const auto numel = static_cast<size_t>(memory.numel());
  call.reduce_step = [=, type = memory.scalar_type(), op = options.reduceOp,
                      begin = share_begin(numel, rank_, size_),
                      end = share_begin(numel, rank_ + 1, size_)](const auto& buffers) {
    reduce_elements(
        type, op, as_sources(buffers), {buffers[static_cast<size_t>(root)]}, begin, end);
  };
  if (root == rank_) call.copy_out = [tensor, memory] { assign(tensor, memory); };
  return start(std::move(call), OpType::REDUCE, "shm:reduce", {tensor});
}

ShmBackend::WorkPtr ShmBackend::gather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const bool has_outputs = outputs.size() == 1 && inputs.size() == 1 &&
                           outputs[0].size() == static_cast<size_t>(size_) &&
                           are_like(outputs[0], inputs[0]);
  const bool ours = inputs.size() == 1 && is_plain(inputs[0]) && root >= 0 && root < size_ &&
                    (root == rank_ ? has_outputs : outputs.empty());
  if (!ours) {
    return fall_back(
        {Kind::kGather, OpType::GATHER, inputs, joined(outputs), options.timeout},
        [&] { return FallbackBackend::gather(outputs, inputs, options); });
  }
  return abort_on_error(
      "gather", [&] { return gather_to(root, joined(outputs), inputs[0], options); });
}

ShmBackend::WorkPtr ShmBackend::gather_to(
    int root, Tensors outputs, const Tensor& input, const c10d::GatherOptions& options) {
  // No rank reads the memory of the root.
  const auto memory = root == rank_ ? input : shared(input, *arena_);
  Call call;
  call.timeout = options.timeout;
  if (root != rank_) call.keep(memory);
  call.descriptor = describe(Kind::kGather, memory, *arena_);
  call.descriptor.root = root;
  call.reduce_step = [outputs, input, root](const auto& buffers) {
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const bool own = static_cast<int>(rank) == root;
      assign(outputs[rank], own ? input : at_buffer(buffers[rank], input));
    }
  };
  return start(std::move(call), OpType::GATHER, "shm:gather", std::move(outputs));
}

ShmBackend::WorkPtr ShmBackend::scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const auto root = static_cast<int>(options.rootRank);
  const bool has_inputs = inputs.size() == 1 && outputs.size() == 1 &&
                          inputs[0].size() == static_cast<size_t>(size_) &&
                          are_like(inputs[0], outputs[0]);
  const bool ours = outputs.size() == 1 && is_plain(outputs[0]) && root >= 0 && root < size_ &&
                    (root == rank_ ? has_inputs : inputs.empty());
  if (!ours) {
    return fall_back({Kind::kScatter, OpType::SCATTER, outputs, outputs, options.timeout}, [&] {
      return FallbackBackend::scatter(outputs, inputs, options);
    });
  }
  return abort_on_error(
      "scatter", [&] { return scatter_from(root, outputs[0], joined(inputs), options); });
}

ShmBackend::WorkPtr ShmBackend::scatter_from(
    int root, const Tensor& output, const Tensors& inputs, const c10d::ScatterOptions& options) {
  Call call;
  call.timeout = options.timeout;
  auto memory = output;  // of the root: what it sends to each rank
  if (root == rank_) {
    memory = joined_in_arena(inputs, *arena_);
    call.keep(memory);
  }
  call.descriptor = describe(Kind::kScatter, memory, *arena_);
  call.descriptor.root = root;
  call.descriptor.numel = static_cast<uint64_t>(output.numel());
  call.reduce_step = [output, root, offset = rank_ * output.nbytes()](const auto& buffers) {
    assign(output, at_buffer(buffers[static_cast<size_t>(root)] + offset, output));
  };
  return start(std::move(call), OpType::SCATTER, "shm:scatter", {output});
}

ShmBackend::WorkPtr ShmBackend::gather_into(
    Tensors outputs, const Tensor& input, std::chrono::milliseconds timeout) {
  const auto memory = shared(input, *arena_);
  Call call;
  call.timeout = timeout;
  call.keep(memory);
  call.descriptor = describe(Kind::kAllGather, memory, *arena_);
  call.reduce_step = [outputs, memory](const auto& buffers) {
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      assign(outputs[rank], at_buffer(buffers[rank], memory));
    }
  };
  return start(std::move(call), OpType::ALLGATHER, "shm:all_gather", std::move(outputs));
}

ShmBackend::WorkPtr ShmBackend::allgather(
    std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const bool ours = inputs.size() == 1 && outputs.size() == 1 && is_plain(inputs[0]) &&
                    outputs[0].size() == static_cast<size_t>(size_) &&
                    are_like(outputs[0], inputs[0]);
  if (!ours) {
    return fall_back(
        {Kind::kAllGather, OpType::ALLGATHER, inputs, joined(outputs), options.timeout},
        [&] { return FallbackBackend::allgather(outputs, inputs, options); });
  }
  return abort_on_error(
      "all_gather", [&] { return gather_into(outputs[0], inputs[0], options.timeout); });
}

ShmBackend::WorkPtr ShmBackend::DDP_ALL_GATHER_SINGLE(
    Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  const bool ours = is_plain(input) && is_plain(output) &&
                    output.scalar_type() == input.scalar_type() &&
                    output.numel() == input.numel() * size_;
  if (!ours) {
    return fall_back(
        {Kind::kAllGather, OpType::_ALLGATHER_BASE, {input}, {output}, options.timeout},
        [&] { return FallbackBackend::DDP_ALL_GATHER_SINGLE(output, input, options); });
  }
  return abort_on_error("all_gather", [&] {
    // Checked here, because if only this rank's output is wrong, Gloo would wait for the others.
    DDP_CHECK_VALUE(
        output.is_contiguous(), "all_gather: expected a contiguous output, got one of strides ",
        output.strides(), " on rank ", rank_, ".");
    const auto all = flat(output);
    Tensors parts;
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back(all.narrow(0, rank * input.numel(), input.numel()));
    }
    return gather_into(std::move(parts), input, options.timeout);
  });
}

ShmBackend::WorkPtr ShmBackend::reduce_into(
    const Tensor& output, const Tensor& memory, const c10d::ReduceScatterOptions& options) {
  Call call;
  call.timeout = options.timeout;
  call.keep(memory);
  call.descriptor = describe(Kind::kReduceScatter, memory, *arena_);
  call.descriptor.reduction = options.reduceOp.op_;
  const auto result =
      output.is_contiguous() ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  const auto numel = static_cast<size_t>(output.numel());
  const size_t begin = numel * static_cast<size_t>(rank_);
  call.reduce_step = [=, op = options.reduceOp](const auto& buffers) {
    // reduce_elements() writes to the indices that it reads, which begin at this rank's share.
    auto* whole = bytes_of(result) - begin * result.element_size();
    reduce_elements(result.scalar_type(), op, as_sources(buffers), {whole}, begin, begin + numel);
  };
  call.copy_out = [output, result] { assign(output, result); };
  return start(std::move(call), OpType::REDUCE_SCATTER, "shm:reduce_scatter", {output});
}

ShmBackend::WorkPtr ShmBackend::reduce_scatter(
    Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) {
  const bool ours = outputs.size() == 1 && inputs.size() == 1 && is_plain(outputs[0]) &&
                    inputs[0].size() == static_cast<size_t>(size_) &&
                    are_like(inputs[0], outputs[0]) &&
                    can_reduce(outputs[0].scalar_type(), options.reduceOp);
  if (!ours) {
    return fall_back(
        {Kind::kReduceScatter, OpType::REDUCE_SCATTER, outputs, outputs, options.timeout},
        [&] { return FallbackBackend::reduce_scatter(outputs, inputs, options); });
  }
  return abort_on_error("reduce_scatter", [&] {
    return reduce_into(outputs[0], joined_in_arena(inputs[0], *arena_), options);
  });
}

ShmBackend::WorkPtr ShmBackend::DDP_REDUCE_SCATTER_SINGLE(
    Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  const bool ours =
      is_plain(input) && is_plain(output) && output.scalar_type() == input.scalar_type() &&
      input.numel() == output.numel() * size_ && can_reduce(output.scalar_type(), options.reduceOp);
  if (!ours) {
    return fall_back(
        {Kind::kReduceScatter, OpType::_REDUCE_SCATTER_BASE, {output}, {output}, options.timeout},
        [&] { return FallbackBackend::DDP_REDUCE_SCATTER_SINGLE(output, input, options); });
  }
  return abort_on_error(
      "reduce_scatter", [&] { return reduce_into(output, shared(input, *arena_), options); });
}

ShmBackend::WorkPtr ShmBackend::exchange(
    Tensors outputs, const Tensors& inputs, Tensors results, std::chrono::milliseconds timeout) {
  return abort_on_error("all_to_all", [&] {
    const auto exchanged =
        std::make_shared<ExchangedTensors>(std::move(outputs), inputs, *arena_, rank_);
    Call call;
    call.timeout = timeout;
    call.memory = exchanged;
    call.descriptor = exchanged->descriptor();
    call.check_agreement = [exchanged](const auto& buffers) {
      return exchanged->compare_tables(buffers);
    };
    call.reduce_step = [exchanged](const auto& buffers) { exchanged->exchange(buffers); };
    call.copy_out = [exchanged] { exchanged->copy_out(); };
    return start(std::move(call), OpType::ALLTOALL, "shm:all_to_all", std::move(results));
  });
}

ShmBackend::WorkPtr ShmBackend::DDP_ALL_TO_ALL_SINGLE(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  auto to = parts_of(output, output_splits, size_);
  const auto from = parts_of(input, input_splits, size_);
  const bool ours = !to.empty() && !from.empty() && input.scalar_type() == output.scalar_type();
  if (!ours) {  // Gloo reports why
    return fall_back(
        {Kind::kAllToAll, OpType::ALLTOALL_BASE, {input}, {output}, options.timeout}, [&] {
          return FallbackBackend::DDP_ALL_TO_ALL_SINGLE(
              output, input, output_splits, input_splits, options);
        });
  }
  return exchange(std::move(to), from, {output}, options.timeout);
}

ShmBackend::WorkPtr ShmBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto ranks = static_cast<size_t>(size_);
  const bool ours = outputs.size() == ranks && inputs.size() == ranks && are_plain(inputs) &&
                    are_plain(outputs) && inputs[0].scalar_type() == outputs[0].scalar_type();
  if (!ours) {
    return fall_back({Kind::kAllToAll, OpType::ALLTOALL, inputs, outputs, options.timeout}, [&] {
      return FallbackBackend::alltoall(outputs, inputs, options);
    });
  }
  return exchange(outputs, inputs, outputs, options.timeout);
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

// Completes after the calls that Gloo carries, too, as Gloo's own barrier does.
ShmBackend::WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Call call;
  call.timeout = options.timeout;
  auto barrier = start(std::move(call), OpType::BARRIER, "shm:barrier", {});
  if (!reset_used_gloo()) return barrier;
  return combine_works({barrier, FallbackBackend::barrier(options)});
}

}  // namespace ddp::backends::shm
