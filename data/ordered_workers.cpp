#include "ordered_workers.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/system/start_thread.h>

namespace ddp {

OrderedWorkers::OrderedWorkers(size_t workers, size_t depth, Draw draw)
    : depth_(depth), draw_(std::move(draw)) {
  try {
    for (size_t i = 0; i < std::min(workers, depth); ++i) {
      threads_.push_back(start_thread([this] { work_until_drained(); }));
    }
  } catch (...) {  // thread creation failed: the threads that run would outlive this object
    stop();
    throw;
  }
}

void OrderedWorkers::work_until_drained() {
  while (auto ticket = draw_next()) {
    Outcome outcome;
    try {
      ticket->work->run();
      outcome.work = std::move(ticket->work);
    } catch (...) {
      outcome.error = std::current_exception();
    }
    finish(ticket->number, std::move(outcome));
  }
}

std::optional<OrderedWorkers::Ticket> OrderedWorkers::draw_next() {
  const std::lock_guard<std::mutex> turn(draw_mutex_);
  Ticket ticket;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    has_room_.wait(lock, [&] { return state_ != State::Drawing || drawn_ - taken_ < depth_; });
    if (state_ != State::Drawing) return std::nullopt;
    ticket.number = drawn_++;
  }
  try {
    ticket.work = draw_();
    if (ticket.work) return ticket;
    finish(ticket.number, Outcome());
  } catch (...) {
    finish(ticket.number, Outcome{nullptr, std::current_exception()});
  }
  return std::nullopt;
}

void OrderedWorkers::finish(size_t number, Outcome outcome) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!outcome.work && state_ == State::Drawing) state_ = State::Drained;
    outcomes_.emplace(number, std::move(outcome));
  }
  finished_.notify_one();
}

std::unique_ptr<Work> OrderedWorkers::next() {
  Outcome outcome;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (state_ == State::Stopped) return nullptr;
    finished_.wait(lock, [&] { return !outcomes_.empty() && outcomes_.begin()->first == taken_; });
    outcome = std::move(outcomes_.begin()->second);
    outcomes_.erase(outcomes_.begin());
    ++taken_;
  }
  has_room_.notify_one();
  if (outcome.work) return std::move(outcome.work);
  stop();
  if (outcome.error) std::rethrow_exception(outcome.error);
  return nullptr;
}

void OrderedWorkers::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = State::Stopped;
  }
  has_room_.notify_one();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  outcomes_.clear();
}

}  // namespace ddp
