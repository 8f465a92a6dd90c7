#include "backends/mpi/mpi_work.h"

#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include "backends/mpi/channel.h"
#include "base/executor.h"

namespace ddp::backends::mpi {
namespace {

// Never destroyed: a callback may run while the program exits.
Executor& callbacks() {
  static auto* executor = new Executor;
  return *executor;
}

}  // namespace

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
