#include "backends/mpi/channel.h"

#include <ddp/internal/check.h>

#include "backends/mpi/mpi_thread.h"

namespace ddp::backends::mpi {

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
  const auto error =
      std::make_exception_ptr(readable_error<c10::DistBackendError>(DDP_HERE, failure_));
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

}  // namespace ddp::backends::mpi
