#include "hierarchical_backend.h"

#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>

#include "../memory/tensors.h"
#include "reduce.h"
#include "work/collective_handle.h"

namespace ddp::backends::shm {

HierarchicalBackend::HierarchicalBackend(
    int rank, int world_size, std::shared_ptr<HostMemory> memory, Host host,
    c10::intrusive_ptr<c10d::Backend> leaders, c10::intrusive_ptr<c10d::Backend> gloo,
    std::chrono::milliseconds timeout)
    : FallbackBackend(rank, world_size, std::move(memory), std::make_shared<GlooCarrier>(gloo)),
      pipeline_(HierarchicalPipeline::make(
          world_size, std::move(host), std::move(leaders), std::move(gloo))),
      latest_(WorkPtr()) {
  pipeline_->set_timeout(timeout);
}

HierarchicalBackend::~HierarchicalBackend() { pipeline_->close(); }

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  FallbackBackend::setTimeout(timeout);
  pipeline_->set_timeout(timeout);
}

uint64_t HierarchicalBackend::getSequenceNumberForGroup() {
  return FallbackBackend::getSequenceNumberForGroup() + pipeline_->host().intra_reduce->announced();
}

void HierarchicalBackend::shutdown() {
  pipeline_->close();
  FallbackBackend::shutdown();
}

void HierarchicalBackend::abort() { pipeline_->fail(kGroupAborted); }

HierarchicalBackend::WorkPtr HierarchicalBackend::run(Collective c) {
  if (c.kind == Kind::Barrier) return run_barrier(c);
  const bool is_ours =
      c.kind == Kind::AllReduce && are_plain(c.in) && can_reduce(c.in[0].scalar_type(), c.op);
  if (!is_ours) return FallbackBackend::run(std::move(c));
  c10d::AllreduceOptions options;
  options.reduceOp = c.op;
  options.timeout = c.timeout;
  std::vector<WorkPtr> works;
  for (const auto& tensor : c.in) works.push_back(start(Kind::AllReduce, tensor, options));
  return works.size() == 1 ? works[0] : combine_works(std::move(works), c.results());
}

// An all-reduce of one element. It completes after the operations before it, whose works may still
// be about to complete, and after the calls that Gloo carries.
HierarchicalBackend::WorkPtr HierarchicalBackend::run_barrier(const Collective& c) {
  WorkPtr before;
  {
    const std::lock_guard lock(latest_mutex_);
    before = latest_.lock();
  }
  c10d::AllreduceOptions as_sum;
  as_sum.timeout = c.timeout;
  std::vector<WorkPtr> parts{start(Kind::Barrier, at::zeros({1}, at::kFloat), as_sum)};
  try {
    parts.push_back(FallbackBackend::run(c));
  } catch (const std::exception&) {
    pipeline_->check();  // throws the reason why Gloo's connections are closed
    throw;
  }
  if (before) parts.push_back(before);
  return combine_works(std::move(parts));
}

at::Tensor HierarchicalBackend::shared_or_abort(Kind kind, const Tensor& tensor) {
  try {
    return shared(tensor, *arena_);
  } catch (const std::exception& error) {
    const char* name = kind == Kind::Barrier ? "barrier" : "all_reduce";
    pipeline_->fail(why_not_started(name, rank_, size_, error));
    throw;
  }
}

HierarchicalBackend::WorkPtr HierarchicalBackend::start(
    Kind kind, const Tensor& tensor, const c10d::AllreduceOptions& options) {
  const auto& host = pipeline_->host();
  host.intra_reduce->check_owner();
  const bool reduces = kind == Kind::AllReduce;
  const auto operation = std::make_shared<HierarchicalOperation>();
  operation->kind = kind;
  operation->tensor = tensor;
  operation->memory = shared_or_abort(kind, tensor);
  operation->options = options;
  operation->work = c10::make_intrusive<ShmWork>(
      Engines{host.intra_reduce, host.intra_broadcast}, rank_,
      reduces ? c10d::OpType::ALLREDUCE : c10d::OpType::BARRIER,
      reduces ? "shm:all_reduce" : "shm:barrier", reduces ? Tensors{tensor} : Tensors{});
  operation->work->getFuture();  // so that the progress threads wait on the doorbell
  {
    const std::lock_guard lock(latest_mutex_);
    latest_ = WorkPtr(operation->work);
  }
  pipeline_->start(operation);
  return operation->work;
}

}  // namespace ddp::backends::shm
