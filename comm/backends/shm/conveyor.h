#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace ddp::backends::shm {

/// One thread that does jobs in the order in which they come.
///
/// Thread safety: push() from any thread. A job may close the conveyor, or end it.
template <typename Job>
class Conveyor {
 public:
  explicit Conveyor(std::function<void(Job)> act) : state_(std::make_shared<State>()) {
    state_->act = std::move(act);
    thread_ = std::thread([state = state_] { run(*state); });
  }

  ~Conveyor() { close(); }
  Conveyor(const Conveyor&) = delete;
  Conveyor& operator=(const Conveyor&) = delete;

  /// Does what has come, and ends: before this returns, but where a job calls it. By one thread.
  void close() {
    {
      const std::lock_guard lock(state_->mutex);
      state_->closing = true;
    }
    state_->changed.notify_one();
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// \return  whether the job will be done: it is not once the conveyor closes.
  bool push(Job job) {
    const auto state = state_;  // the job may end this before it is announced
    {
      const std::lock_guard lock(state->mutex);
      if (state->closing) return false;
      state->jobs.push_back(std::move(job));
    }
    state->changed.notify_one();
    return true;
  }

 private:
  struct State {
    std::function<void(Job)> act;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool closing = false;
  };

  static void run(State& state) {
    std::unique_lock lock(state.mutex);
    while (true) {
      state.changed.wait(lock, [&] { return state.closing || !state.jobs.empty(); });
      if (state.jobs.empty()) return;
      Job job = std::move(state.jobs.front());
      state.jobs.pop_front();
      lock.unlock();
      state.act(std::move(job));
      lock.lock();
    }
  }

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ddp::backends::shm
