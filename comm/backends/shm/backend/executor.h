#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <ddp/internal/owner_process.h>

namespace ddp::backends::shm {

/// One thread that runs jobs in the order in which they are pushed.
///
/// Thread safety: push() from any thread. A job may close or destroy the executor. A process that
/// the owner forked does not have the thread: there, close() does nothing.
template <typename Job>
class Executor {
 public:
  explicit Executor(std::function<void(Job)> run_job) : state_(std::make_shared<State>()) {
    state_->run_job = std::move(run_job);
    thread_ = std::thread([state = state_] { run(*state); });
  }

  ~Executor() { close(); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs the jobs that were pushed, and ends the thread: before close() returns, unless a job
  /// calls close(). To be called by one thread.
  void close() {
    if (!owner_.is_this_one()) {
      if (thread_.joinable()) thread_.detach();
      return;
    }
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

  /// \return  whether the job will run: it will not if the executor is closing.
  bool push(Job job) {
    const auto state = state_;  // the job may destroy this executor before notify_one()
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
    std::function<void(Job)> run_job;
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
      state.run_job(std::move(job));
      lock.lock();
    }
  }

  const OwnerProcess owner_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ddp::backends::shm
