#include "backends/gloo_point_to_point.h"

#include <utility>

namespace ddp::backends {

GlooPointToPoint::GlooPointToPoint(
    c10::intrusive_ptr<c10d::Work> work, std::chrono::milliseconds timeout)
    : c10d::Work(-1, work->retrieveOpType()), work_(std::move(work)), timeout_(timeout) {}

GlooPointToPoint::~GlooPointToPoint() {
  if (!waiter_.joinable()) return;
  if (!owner_.is_this_one()) {  // which has no such thread
    waiter_.detach();
    return;
  }
  if (!Work::isCompleted()) work_->abort();
  waiter_.join();
}

bool GlooPointToPoint::isCompleted() {
  if (claim()) waiter_ = std::thread([this] { finish_transfer(timeout_); });
  return Work::isCompleted();
}

bool GlooPointToPoint::wait(std::chrono::milliseconds timeout) {
  if (claim()) finish_transfer(timeout == kNoTimeout ? timeout_ : timeout);
  return Work::wait(timeout) && arrived_;
}

void GlooPointToPoint::abort() { work_->abort(); }

int GlooPointToPoint::sourceRank() const { return work_->sourceRank(); }

uint64_t GlooPointToPoint::getSequencenumber() const { return work_->getSequencenumber(); }

bool GlooPointToPoint::claim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(claimed_, true);
}

void GlooPointToPoint::finish_transfer(std::chrono::milliseconds timeout) {
  std::exception_ptr error;
  try {
    arrived_ = work_->wait(timeout);
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

}  // namespace ddp::backends
