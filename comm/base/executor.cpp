#include "base/executor.h"

#include <condition_variable>
#include <deque>
#include <mutex>

#include <ddp/internal/system/start_thread.h>

namespace ddp {

/// Shared with the thread, which may outlive the executor.
struct Executor::State {
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool closing = false;
  bool ended = false;  // the thread runs no more jobs
};

Executor::Executor()
    : state_(std::make_shared<State>()), thread_(start_thread([state = state_] { run(*state); })) {}

bool Executor::push(Job job) {
  const auto state = state_;  // the job may destroy this executor before notify_all()
  {
    const std::lock_guard lock(state->mutex);
    if (state->closing) return false;
    state->jobs.push_back(std::move(job));
  }
  state->changed.notify_all();
  return true;
}

void Executor::close(Deadline::Milliseconds at_most) {
  if (!thread_.joinable()) return;
  bool ended = false;
  if (has_thread()) {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    state_->changed.notify_all();
    ended = thread_.get_id() != std::this_thread::get_id() &&
            state_->changed.wait_until(lock, Deadline::in(at_most), [&] { return state_->ended; });
  }
  ended ? thread_.join() : thread_.detach();
}

void Executor::run(State& state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.closing || !state.jobs.empty(); });
    if (state.jobs.empty()) break;
    auto job = std::move(state.jobs.front());
    state.jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // without the lock, because it may own the executor
    lock.lock();
  }
  state.ended = true;
  state.changed.notify_all();
}

}  // namespace ddp
