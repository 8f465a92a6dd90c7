#include "hierarchical_pipeline.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "../memory/tensors.h"
#include "reduce.h"

namespace ddp::backends::shm {
namespace {

// Gloo's minimum or maximum of a number and a NaN is either, depending on their order.
bool may_lose_nan(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return tensor.is_floating_point() && (op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX);
}

// Longer than the leader's waits, because the leader, which waits for the other hosts, is to report
// that they took too long. It may wait for the group's timeout four times: for the intra-host
// reduction, for the two collectives of an OrderedReduction, and for the broadcast.
std::chrono::milliseconds wait_for_leader(std::chrono::milliseconds timeout) {
  constexpr int kWaitsOfLeader = 4;
  return kWaitsOfLeader * std::min(timeout, timeout.max() / kWaitsOfLeader);
}

}  // namespace

OrderedReduction::OrderedReduction(
    c10d::Backend& backend, const at::Tensor& tensor, const c10d::AllreduceOptions& options)
    : backend_(backend), tensor_(flat(tensor)), options_(options) {
  const int64_t ranks = backend.getSize();
  if (ranks == 2 && !may_lose_nan(tensor, options.reduceOp)) {  // a + b is b + a
    std::vector<at::Tensor> tensors{tensor_};
    work_ = backend.allreduce(tensors, options);
    return;
  }
  const int64_t part = tensor_.numel() / ranks + 1;
  all_ = at::empty({ranks * part}, tensor_.options());
  parts_ = at::empty_like(all_);
  assign(all_.narrow(0, 0, tensor_.numel()), tensor_);
  all_.narrow(0, tensor_.numel(), all_.numel() - tensor_.numel()).zero_();
  std::vector<int64_t> equal;
  c10d::AllToAllOptions to_all;
  to_all.timeout = options.timeout;
  work_ = backend.DDP_ALL_TO_ALL_SINGLE(parts_, all_, equal, equal, to_all);
}

void OrderedReduction::combine(Wait wait) {
  if (!parts_.defined()) return;
  wait(*work_);
  const int64_t part = parts_.numel() / backend_.getSize();
  std::vector<const std::byte*> sources;
  for (const auto& of_rank : parts_.split(part)) sources.push_back(bytes_of(of_rank));
  auto mine = at::empty({part}, parts_.options());
  reduce_elements(
      parts_.scalar_type(), options_.reduceOp, sources, {bytes_of(mine)}, 0,
      static_cast<size_t>(part));
  c10d::AllgatherOptions gather;
  gather.timeout = options_.timeout;
  work_ = backend_.DDP_ALL_GATHER_SINGLE(all_, mine, gather);
}

void OrderedReduction::finish(Wait wait) {
  wait(*work_);
  if (all_.defined()) assign(tensor_, all_.narrow(0, 0, tensor_.numel()));
}

std::shared_ptr<HierarchicalPipeline> HierarchicalPipeline::make(
    int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
    c10::intrusive_ptr<c10d::Backend> gloo) {
  std::shared_ptr<HierarchicalPipeline> pipeline(
      new HierarchicalPipeline(world_size, std::move(host), std::move(leaders), std::move(gloo)));
  if (pipeline->host_.is_led_by_this_rank()) {
    pipeline->reducer_ = std::make_unique<Executor>();
    pipeline->broadcaster_ = std::make_unique<Executor>();
  }
  return pipeline;
}

HierarchicalPipeline::HierarchicalPipeline(
    int world_size, Host host, c10::intrusive_ptr<c10d::Backend> leaders,
    c10::intrusive_ptr<c10d::Backend> gloo)
    : host_(std::move(host)),
      world_size_(world_size),
      leaders_(std::move(leaders)),
      gloo_(std::move(gloo)) {}

// The pipeline owns the executors, so their threads hold it weakly.
template <typename Step>
void HierarchicalPipeline::push(Executor& executor, const OperationPtr& operation, Step step) {
  const bool pushed = executor.push([weak = weak_from_this(), operation, step = std::move(step)] {
    const auto self = weak.lock();
    self ? step(*self) : operation->work->complete(backend_error(kGroupDestroyed));
  });
  DDP_CHECK_WITH(DistBackendError, pushed, kGroupDestroyed);
}

void HierarchicalPipeline::set_timeout(std::chrono::milliseconds timeout) {
  host_.intra_reduce->set_timeout(timeout);
  host_.intra_broadcast->set_timeout(leaders_ ? timeout : wait_for_leader(timeout));
  if (leaders_) leaders_->setTimeout(timeout);
}

void HierarchicalPipeline::start(const OperationPtr& operation) {
  ++pending_;
  try {
    intra_reduce(operation);
    if (reducer_) {
      push(*reducer_, operation, [operation](auto& self) { self.inter_reduce(operation); });
    } else {
      intra_broadcast(operation);
    }
  } catch (...) {
    complete(operation, std::current_exception());
  }
}

void HierarchicalPipeline::fail(const std::string& why) {
  if (!owner_.is_this_one()) return;
  {
    const std::lock_guard lock(mutex_);
    if (!abort_reason_.empty()) return;
    abort_reason_ = why;
    // Done before a caller can see the failure, also on a thread that waits for this lock, so that
    // no later call can start.
    gloo_->abort();
    if (leaders_) leaders_->abort();
  }
  host_.intra_reduce->fail(why);
  host_.intra_broadcast->fail(why);
}

void HierarchicalPipeline::check() const {
  const std::lock_guard lock(mutex_);
  DDP_CHECK_WITH(DistBackendError, abort_reason_.empty(), abort_reason_);
}

void HierarchicalPipeline::close() {
  if (!owner_.is_this_one() || closed_.exchange(true)) return;
  host_.intra_reduce->progress();
  host_.intra_broadcast->progress();
  if (pending_ > 0) fail(kGroupDestroyed);
  if (reducer_) reducer_->close();
  if (broadcaster_) broadcaster_->close();
  host_.intra_reduce->close();
  host_.intra_broadcast->close();
}

// Each rank reduces its share of the host's tensors into the leader's memory.
void HierarchicalPipeline::intra_reduce(const OperationPtr& operation) {
  const auto& memory = operation->memory;
  Call call;
  call.timeout = operation->options.timeout;
  call.keep(memory);
  call.descriptor = describe(operation->kind, memory, *host_.arena);
  call.descriptor.reduction = operation->options.reduceOp.op_;
  const auto numel = static_cast<size_t>(memory.numel());
  call.reduce_step = [type = memory.scalar_type(), op = operation->options.reduceOp,
                      begin = share_begin(numel, host_.local_rank, host_.local_size),
                      end = share_begin(numel, host_.local_rank + 1, host_.local_size),
                      factor = 1.0 / world_size_](const auto& buffers) {
    reduce_elements(type, op, as_sources(buffers), {buffers[0]}, begin, end, factor);
  };
  call.on_complete = [self = shared_from_this(), operation](const std::exception_ptr& error) {
    operation->intra_reduced.set_value(error);
    if (error) self->fail(text_of(error));
  };
  operation->intra_reduce_number = host_.intra_reduce->start(std::move(call));
}

void HierarchicalPipeline::wait_for_intra_reduce(HierarchicalOperation& operation) const {
  auto reduced = operation.intra_reduced.get_future();
  while (reduced.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    host_.intra_reduce->wait(operation.intra_reduce_number, std::chrono::milliseconds(50));
  }
  if (const auto error = reduced.get()) std::rethrow_exception(error);
}

// The leaders reduce the hosts' results.
void HierarchicalPipeline::inter_reduce(const OperationPtr& operation) {
  try {
    wait_for_intra_reduce(*operation);
    check();
    auto options = operation->options;
    // The intra-host reduction has already divided by the world size.
    if (options.reduceOp == c10d::ReduceOp::AVG) options.reduceOp = c10d::ReduceOp::SUM;
    note_between_hosts(/*begins=*/true);
    const auto reduction =
        std::make_shared<OrderedReduction>(*leaders_, operation->memory, options);
    between_hosts([&](const auto& wait) { reduction->combine(wait); });
    push(*broadcaster_, operation, [operation, reduction](auto& self) {
      self.broadcast_when_reduced(operation, *reduction);
    });
  } catch (...) {
    complete(operation, std::current_exception());
  }
}

void HierarchicalPipeline::broadcast_when_reduced(
    const OperationPtr& operation, OrderedReduction& reduction) {
  try {
    between_hosts([&](const auto& wait) { reduction.finish(wait); });
    note_between_hosts(/*begins=*/false);
    intra_broadcast(operation);
  } catch (...) {
    complete(operation, std::current_exception());
  }
}

// Each rank copies from the leader.
void HierarchicalPipeline::intra_broadcast(const OperationPtr& operation) {
  const bool leads = host_.is_led_by_this_rank();
  const auto timeout = operation->options.timeout;
  Call call;
  call.timeout = leads ? timeout : wait_for_leader(timeout);
  call.keep(operation->memory);
  call.descriptor = describe(Kind::Broadcast, operation->memory, *host_.arena);
  if (leads) {
    call.copy_out = [operation] { assign(operation->tensor, operation->memory); };
  } else {
    call.reduce_step = [operation](const auto& buffers) {
      assign(operation->tensor, at_buffer(buffers[0], operation->tensor));
    };
  }
  call.on_complete = [self = shared_from_this(), operation](const std::exception_ptr& error) {
    self->complete(operation, error);
  };
  host_.intra_broadcast->announce(std::move(call));
}

void HierarchicalPipeline::complete(
    const OperationPtr& operation, const std::exception_ptr& error) {
  if (error) fail(text_of(error));
  --pending_;
  operation->work->complete(error);
}

// An operation that fails stays counted: the group is aborted then.
void HierarchicalPipeline::note_between_hosts(bool begins) {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex_);
  if (begins && between_hosts_++ == 0) between_since_ = now;
  if (!begins && --between_hosts_ == 0) between_time_ += now - between_since_;
}

std::optional<double> HierarchicalPipeline::inter_host_ms() const {
  if (!leaders_) return {};
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double, std::milli>(between_time_).count();
}

// Gloo may drop a work when that is aborted, and then completes it at its timeout only.
void HierarchicalPipeline::wait_or_abort(c10d::Work& work) const {
  constexpr std::chrono::milliseconds kPollInterval{250};
  while (!work.isCompleted()) {
    try {
      work.wait(kPollInterval);
    } catch (const std::exception&) {
      // Late or failed; isCompleted() distinguishes them.
    }
    check();
  }
  work.wait();
}

// Gloo's errors name connections. The leaders' ranks are added to identify the hosts.
void HierarchicalPipeline::between_hosts(
    c10::function_ref<void(OrderedReduction::Wait)> step) const {
  try {
    step([this](c10d::Work& work) { wait_or_abort(work); });
  } catch (const std::exception&) {
    check();
    DDP_CHECK_WITH(
        DistBackendError, false, text_of(std::current_exception()),
        " (between hosts, whose leaders are ranks ", joined_by(", ", host_.leaders), ")");
  }
}

}  // namespace ddp::backends::shm
