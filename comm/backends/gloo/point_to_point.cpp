#include "backends/gloo/point_to_point.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

namespace ddp::backends {
namespace {

constexpr std::chrono::milliseconds kPoll{50};
// A peer that leaves the group may have sent a message that this rank still receives.
constexpr std::chrono::milliseconds kLastMessages{1000};

}  // namespace

GlooPointToPoint::GlooPointToPoint(
    WorkPtr first, Transfer transfer, std::chrono::milliseconds timeout)
    : c10d::Work(-1, first->retrieveOpType()),
      first_(std::move(first)),
      timeout_(timeout),
      transfer_(std::move(transfer)),
      current_(first_) {}

GlooPointToPoint::GlooPointToPoint(
    WorkPtr first, Transfer transfer, MessageGroupPtr group, int peer)
    : c10d::Work(-1, first->retrieveOpType()),
      first_(std::move(first)),
      timeout_(group->timeout),
      group_(std::move(group)),
      peer_(peer),
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
  if (claim()) waiter_ = std::thread([this] { finish_transfer(timeout_); });
}

int GlooPointToPoint::sourceRank() const {
  const int source = first_->sourceRank();
  return group_ ? group_->rank_of(source) : source;
}

bool GlooPointToPoint::isCompleted() {
  start();
  if (group_ && !Work::isCompleted()) abort_if_over();
  return Work::isCompleted();
}

bool GlooPointToPoint::wait(std::chrono::milliseconds timeout) {
  if (group_) return wait_in_group(timeout);
  if (claim()) finish_transfer(timeout == kNoTimeout ? timeout_ : timeout);
  return Work::wait(timeout) && arrived_;
}

bool GlooPointToPoint::wait_in_group(std::chrono::milliseconds timeout) {
  const Deadline end(timeout == kNoTimeout ? std::chrono::milliseconds::max() : timeout);
  while (!isCompleted() && !end.passed()) {
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait_for(lock, std::min(kPoll, end.left()), [this] { return completed_; });
  }
  return Work::wait(end.left()) && arrived_;  // throws if it is not completed
}

void GlooPointToPoint::abort_if_over() {
  auto why = why_over();
  if (why.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.empty()) reason_ = std::move(why);
  }
  abort();
}

std::string GlooPointToPoint::why_over() {
  auto ended = group_->why_ended();
  if (!ended.empty()) return ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (deadline_->passed()) {
    return ddp::str("timed out after ", timeout_.count(), " ms without the other rank's call");
  }
  auto left = peer_ < 0 ? "" : group_->why_left(peer_);
  if (left.empty()) return "";
  if (!last_messages_) last_messages_.emplace(kLastMessages);
  return last_messages_->passed() ? left : "";
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
  if (!claimed_) deadline_.emplace(timeout_);
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
  const Deadline deadline(group_ ? std::chrono::milliseconds::max() : timeout);
  std::exception_ptr error;
  try {
    arrived_ = transfer_([&](const WorkPtr& work) { return wait_for(work, deadline.left()); });
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!arrived_ && !reason_.empty()) error = backend_error(reason_);
  } catch (...) {
    error = std::current_exception();
  }
  transfer_ = nullptr;
  finish(error);
}

}  // namespace ddp::backends
