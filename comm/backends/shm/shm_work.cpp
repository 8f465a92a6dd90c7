#include "shm_work.h"

#include <utility>

#include <c10/util/Exception.h>

namespace ddp::backends::shm {

ShmWork::ShmWork(
    std::shared_ptr<Exchange> exchange, int rank, c10d::OpType type, const char* title,
    std::vector<at::Tensor> outputs)
    : ToldWork(rank, type, title, std::move(outputs)), exchange_(std::move(exchange)) {}

void ShmWork::start(Call call) {
  auto self = c10::intrusive_ptr<ShmWork>::unsafe_reclaim_from_nonowning(this);
  call.tell = [self](std::exception_ptr error) { self->end(std::move(error)); };
  number_ = exchange_->begin(std::move(call));
}

bool ShmWork::isCompleted() {
  if (!Work::isCompleted()) exchange_->progress();
  return Work::isCompleted();
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  // Without one the group's decides, which fails the collective.
  const auto at_most = timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout;
  if (!Work::isCompleted()) {
    TORCH_CHECK_WITH(
        DistBackendError, exchange_->wait(number_, at_most), title(), " (collective number ",
        number_, ") is not over after the ", timeout.count(), " ms that wait() was given.");
  }
  return Work::wait(timeout);  // whoever ended it may still be about to say so
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!completed_ && !counts_future_) {
    counts_future_ = true;
    exchange_->count_future(1);
  }
  return ToldWork::getFuture();
}

void ShmWork::abort() { exchange_->fail(kGroupAborted); }

void ShmWork::end(std::exception_ptr error) {
  finish(error);
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(counts_future_, false)) exchange_->count_future(-1);
  }
  complete_future(error);
}

}  // namespace ddp::backends::shm
