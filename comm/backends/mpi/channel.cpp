#include "backends/mpi/channel.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ddp/internal/check.h>

#include "backends/mpi/mpi_thread.h"
#include "base/executor.h"

namespace ddp::backends::mpi {
namespace {

// Never destroyed: a callback may run while the program exits.
Executor& callbacks() {
  static auto* executor = new Executor;
  return *executor;
}

}  // namespace

void Channel::fail(const std::string& what) noexcept {
  std::unordered_set<c10::intrusive_ptr<MpiWork>> pending;
  {
    const std::lock_guard lock(mutex_);
    if (has_failed_) return;
    failure_ = ddp::str("mpi: ", what, " (rank ", rank, " of ", size, ")");
    has_failed_ = true;
    pending.swap(pending_);
  }
  MpiThread::instance().note_failure();
  const auto error = backend_error(failure_);
  for (const auto& work : pending) work->complete(error);
}

void Channel::add(const c10::intrusive_ptr<MpiWork>& work) {
  const std::lock_guard lock(mutex_);
  DDP_CHECK_WITH(DistBackendError, !has_failed_, failure_);
  pending_.insert(work);
}

void Channel::remove(const c10::intrusive_ptr<MpiWork>& work) {
  const std::lock_guard lock(mutex_);
  pending_.erase(work);
}

MpiWork::MpiWork(
    std::shared_ptr<Channel> channel, int rank, c10d::OpType type, const char* title,
    std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, outputs),
      channel_(std::move(channel)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

void MpiWork::complete(const std::exception_ptr& error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_over_, true)) return;
  }
  finish(error);
  {
    const std::lock_guard lock(mutex_);
    is_settled_ = true;
    if (!is_future_used_) return;
  }
  auto self = c10::intrusive_ptr<MpiWork>::unsafe_reclaim_from_nonowning(this);
  callbacks().push([self] { self->complete_future(); });
}

void MpiWork::complete_future() noexcept {
  try {
    const auto error = exception();
    error ? future_->setError(error) : future_->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    TORCH_WARN("mpi: a callback on the future of a collective threw");
  }
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  bool is_late = false;
  {
    const std::lock_guard lock(mutex_);
    is_late = !std::exchange(is_future_used_, true) && is_settled_;
  }
  if (is_late) complete_future();
  return future_;
}

void MpiWork::abort() { channel_->fail(kAborted); }

}  // namespace ddp::backends::mpi
