#include "store/store_executor.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>

namespace ddp {
namespace {

// How long the destructor of an executor waits for posted jobs.
constexpr std::chrono::milliseconds kLastJobs{500};

}  // namespace

struct StoreExecutor::State {
  explicit State(c10::intrusive_ptr<c10d::Store> s) : store(std::move(s)) {}

  c10::intrusive_ptr<c10d::Store> store;
  std::mutex mutex;  // guards the members below
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool closing = false;
  bool ended = false;  // the thread runs no more jobs
  std::thread thread;
};

StoreExecutor::StoreExecutor(c10::intrusive_ptr<c10d::Store> store)
    : state_(std::make_shared<State>(std::move(store))) {}

StoreExecutor::~StoreExecutor() {
  std::unique_lock lock(state_->mutex);
  state_->closing = true;
  if (!state_->thread.joinable()) return;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, kLastJobs, [this] { return state_->ended; });
  auto thread = std::move(state_->thread);
  lock.unlock();
  ended ? thread.join() : thread.detach();
}

void StoreExecutor::post(Job job) {
  const std::lock_guard lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  if (!state_->thread.joinable()) {
    state_->thread = std::thread([state = state_] { run(*state); });
  }
  state_->changed.notify_all();
}

void StoreExecutor::run(State& state) {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.changed.wait(lock, [&] { return state.closing || !state.jobs.empty(); });
    if (state.jobs.empty()) break;
    const Job job = std::move(state.jobs.front());
    state.jobs.pop_front();
    lock.unlock();
    try {
      job(*state.store);
    } catch (const std::exception&) {
    }
    lock.lock();
  }
  state.ended = true;
  state.changed.notify_all();
}

}  // namespace ddp
