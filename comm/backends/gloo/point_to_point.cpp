#include "backends/gloo/point_to_point.h"

#include <utility>

#include <ddp/internal/system/start_thread.h>

#include "base/deadline.h"

namespace ddp::backends {

GlooPointToPoint::GlooPointToPoint(
    WorkPtr first, Transfer transfer, std::chrono::milliseconds timeout)
    : c10d::Work(-1, first->retrieveOpType()),
      first_(std::move(first)),
      timeout_(timeout),
      transfer_(std::move(transfer)),
      current_(first_) {}

GlooPointToPoint::~GlooPointToPoint() {
  if (!waiter_.joinable()) return;
  if (!owner_.is_this_one()) {  // a forked process does not have the thread
    waiter_.detach();
    return;
  }
  if (!Work::isCompleted()) abort();
  waiter_.join();
}

void GlooPointToPoint::start() {
  if (claim()) waiter_ = start_thread([this] { finish_transfer(timeout_); });
}

bool GlooPointToPoint::isCompleted() {
  start();
  return Work::isCompleted();
}

bool GlooPointToPoint::wait(std::chrono::milliseconds timeout) {
  if (claim()) finish_transfer(timeout == kNoTimeout ? timeout_ : timeout);
  return Work::wait(timeout) && arrived_;
}

void GlooPointToPoint::abort() {
  WorkPtr current;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    current = current_;
  }
  current->abort();
}

bool GlooPointToPoint::claim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(claimed_, true);
}

bool GlooPointToPoint::wait_for(const WorkPtr& work, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return false;
    current_ = work;
  }
  return work->wait(timeout);
}

void GlooPointToPoint::finish_transfer(std::chrono::milliseconds timeout) {
  const Deadline deadline(timeout);
  std::exception_ptr error;
  try {
    arrived_ = transfer_([&](const WorkPtr& work) { return wait_for(work, deadline.left()); });
  } catch (...) {
    error = std::current_exception();
  }
  transfer_ = nullptr;
  finish(error);
}

}  // namespace ddp::backends
