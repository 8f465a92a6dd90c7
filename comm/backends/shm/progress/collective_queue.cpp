#include "collective_queue.h"

#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>

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

bool CollectiveQueue::wait_if_empty() {
  std::unique_lock lock(mutex_);
  if (closed_ || !pending_.empty()) return false;
  ++idle_threads_;
  changed_.wait(lock, [this] { return closed_ || !pending_.empty(); });
  --idle_threads_;
  return true;
}

bool CollectiveQueue::is_closed() {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void CollectiveQueue::wait_closed(std::chrono::milliseconds at_most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, at_most, [this] { return closed_; });
}

void CollectiveQueue::wake_one() {
  const std::lock_guard lock(mutex_);
  if (idle_threads_ > 0) changed_.notify_one();
}

bool CollectiveQueue::close() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
  return !std::exchange(closed_, true);
}

}  // namespace ddp::backends::shm
