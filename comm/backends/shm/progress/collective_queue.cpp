#include "collective_queue.h"

#include <utility>

#include <ddp/internal/check.h>

#include "base/deadline.h"

namespace ddp::backends::shm {

void CollectiveQueue::push(PendingPtr pending) {
  const std::lock_guard lock(mutex_);
  DDP_CHECK_WITH(DistBackendError, abort_reason_.empty(), abort_reason_);
  pending_.push_back(std::move(pending));
}

CollectiveQueue::Next CollectiveQueue::next() {
  const std::lock_guard lock(mutex_);
  Next next;
  if (reduced_ < pending_.size()) next.to_reduce = pending_[reduced_].get();
  if (reduced_ > 0) next.to_complete = pending_.front().get();
  return next;
}

Pending* CollectiveQueue::front() {
  const std::lock_guard lock(mutex_);
  return pending_.empty() ? nullptr : pending_.front().get();
}

PendingPtr CollectiveQueue::pop_completed() {
  const std::lock_guard lock(mutex_);
  auto completed = std::move(pending_.front());
  pending_.pop_front();
  --reduced_;
  if (!pending_.empty()) pending_.front()->deadline = Deadline::in(pending_.front()->timeout);
  completed_.fetch_add(1);
  return completed;
}

PendingPtr CollectiveQueue::pop_aborted() {
  const std::lock_guard lock(mutex_);
  if (abort_reason_.empty() || pending_.empty()) return nullptr;
  auto failed = std::move(pending_.front());
  pending_.pop_front();
  failed->error = backend_error(abort_reason_);
  completed_.fetch_add(1);
  return failed;
}

void CollectiveQueue::abort(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (abort_reason_.empty()) abort_reason_ = why;
  aborted_ = true;
}

std::string CollectiveQueue::abort_reason() {
  const std::lock_guard lock(mutex_);
  return abort_reason_;
}

}  // namespace ddp::backends::shm
