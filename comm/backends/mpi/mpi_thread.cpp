#include "backends/mpi/mpi_thread.h"

#include <stdlib.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/start_thread.h>

#include "backends/mpi/channel.h"
#include "backends/mpi/start_mpi.h"

namespace ddp::backends::mpi {
namespace {

using Clock = Deadline::Clock;

// How long the thread only yields after something has moved, and naps after that. A message of 1
// MiB takes less.
constexpr std::chrono::milliseconds kYielding{1};
// A yield that takes this long has given the core to another thread, for a whole slice of its time:
// milliseconds for each message. For a while the thread naps instead, and comes back sooner.
constexpr std::chrono::microseconds kLongYield{200};
constexpr std::chrono::milliseconds kCoreIsWanted{20};
// Naps grow with the time without a move, so that a late rank costs no processor time.
constexpr std::chrono::microseconds kLeastNap{20};
constexpr std::chrono::microseconds kMostNap{1000};
constexpr int kPartOfWait = 16;
// Between operations.
constexpr std::chrono::microseconds kLeastIdleNap{200};
constexpr std::chrono::microseconds kMostIdleNap{20000};
constexpr int kIdlePartOfWait = 4;

// To free communicators takes microseconds.
constexpr std::chrono::seconds kMostOfFree{5};

// Collectives whose numbers differ by this have equal tags, so they are not under way together.
constexpr uint64_t kMostAtOnce = 256;

bool may_advance(Operation& operation) {
  if (!operation.number) return true;
  auto& under_way = operation.channel->under_way;
  if (!under_way.empty() && *operation.number >= *under_way.begin() + kMostAtOnce) return false;
  under_way.insert(*operation.number);
  return true;
}

}  // namespace

MpiThread& MpiThread::instance() {
  static auto* instance = new MpiThread;
  return *instance;
}

const World& MpiThread::world(const Deadline& deadline) {
  DDP_CHECK(
      !has_failed_,
      "init_process_group: expected a working MPI, but a group over it has failed in this process. "
      "Start the job again, or use gloo.");
  check_not_finalized();
  const std::lock_guard lock(world_mutex_);
  if (world_) return *world_;
  const auto start = [this] {
    auto world = start_mpi(initialized_here_);
    all_ranks_ = world.communicator;
    return world;
  };
  world_ = ask(start, Deadline::in(deadline.left()));
  DDP_CHECK(
      world_, "backend mpi: expected MPI_Init to return within ", deadline.timeout().count(),
      " ms, got no answer: it waits for the other ranks. Make the group on every rank.");
  return *world_;
}

void MpiThread::push(std::function<void()> task) {
  DDP_CHECK(
      owner_.is_this_one(),
      "backend mpi: expected the process that made the group, got one that it forked. Start the "
      "ranks by mpirun.");
  {
    const std::lock_guard lock(mutex_);
    if (is_stopping_) return;  // the program exits
    if (!thread_.joinable()) {
      // Called before finish(), for it was registered later.
      on_exit([](int code, void* self) { static_cast<MpiThread*>(self)->note_exit(code); }, this);
      thread_ = start_thread([this] { run(); });
    }
    tasks_.push_back(std::move(task));
    has_tasks_ = true;
  }
  wake_.notify_one();
}

void MpiThread::start(OperationPtr operation) {
  // A std::function must be copyable.
  auto shared = std::make_shared<OperationPtr>(std::move(operation));
  push([this, shared] { active_.push_back(std::move(*shared)); });
}

void MpiThread::release(std::shared_ptr<Channel> channel) noexcept {
  if (!owner_.is_this_one() || has_failed_ || is_stopping_) return;
  const auto free = [this, channel = std::move(channel)] {
    const bool is_used =
        any_of(active_, [&](const auto& operation) { return operation->channel == channel; });
    if (is_used || has_failed_ || is_finalized()) return false;
    for (auto* one : {&channel->collectives, &channel->messages, &channel->elements}) {
      if (*one != MPI_COMM_NULL) MPI_Comm_free(one);
    }
    --connected_;
    return true;
  };
  if (initialized_here_) {
    push(free);
  } else {  // the program may finalize MPI next
    ask(free, Deadline::in(kMostOfFree));
  }
}

bool MpiThread::run_tasks() {
  std::vector<std::function<void()>> tasks;
  {
    std::unique_lock lock(mutex_);
    while (active_.empty() && tasks_.empty() && !is_stopping_) idle(lock);
    tasks.swap(tasks_);
    has_tasks_ = false;
    if (tasks.empty() && is_stopping_) return false;
  }
  for (const auto& task : tasks) task();
  if (!tasks.empty()) last_moved_ = Clock::now();
  return true;
}

/// Sleeps until a task comes or, where MPI is in use, until it is time to give it a turn.
void MpiThread::idle(std::unique_lock<std::mutex>& lock) {
  const auto has_work = [this] { return !tasks_.empty() || is_stopping_; };
  // A program that has initialised MPI may finalize it once no group is left.
  const bool uses_mpi = connected_ > 0 || (initialized_here_ && all_ranks_ != MPI_COMM_NULL);
  if (!uses_mpi || is_finalized()) return wake_.wait(lock, has_work);
  const auto nap = std::clamp<Clock::duration>(
      (Clock::now() - last_moved_) / kIdlePartOfWait, kLeastIdleNap, kMostIdleNap);
  if (wake_.wait_for(lock, nap, has_work)) return;
  lock.unlock();
  int has_message = 0;  // never: this communicator carries no messages
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, all_ranks_, &has_message, MPI_STATUS_IGNORE);
  lock.lock();
}

void MpiThread::run() noexcept {
  // The kernel may lengthen a nap by 50 us otherwise.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  while (true) {
    if ((active_.empty() || has_tasks_) && !run_tasks()) break;
    if (active_.empty()) continue;
    pause(advance_all());
    if (is_stopping_) break;
  }
  finalize();
}

/// \return  whether anything has moved.
bool MpiThread::advance_all() {
  bool has_moved = false;
  size_t kept = 0;
  for (auto& operation : active_) {
    if (operation->channel->has_failed()) {
      (void)operation.release();  // MPI may still write to its memory
    } else if (advance(*operation)) {
      has_moved = true;
      operation.reset();
    } else {
      has_moved |= operation && operation->has_moved();
    }
    if (operation) active_[kept++] = std::move(operation);
  }
  active_.resize(kept);
  return has_moved;
}

/// \return  whether it is over. One that has failed is not: its group has failed, too.
bool MpiThread::advance(Operation& operation) noexcept {
  auto& channel = *operation.channel;
  try {
    if (!may_advance(operation)) return false;
    if (operation.advance()) {
      if (operation.number) channel.under_way.erase(*operation.number);
      channel.remove(operation.work);
      operation.work->complete(nullptr);
      return true;
    }
  } catch (...) {
    channel.fail(text_of(std::current_exception()));
  }
  return false;
}

void MpiThread::pause(bool has_moved) {
  const auto now = Clock::now();
  if (has_moved) {
    last_moved_ = now;
    return;
  }
  for (const auto& operation : active_) {
    if (now < operation->deadline) continue;
    operation->channel->fail(
        operation->title + " timed out: not all ranks have called it, or one has ended");
  }
  if (now - last_moved_ < kYielding && now >= yields_from_) {
    std::this_thread::yield();
    const auto back = Clock::now();
    if (back - now > kLongYield) yields_from_ = back + kCoreIsWanted;
    return;
  }
  const auto nap =
      std::clamp<Clock::duration>((now - last_moved_) / kPartOfWait, kLeastNap, kMostNap);
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, nap, [this] { return !tasks_.empty() || is_stopping_; });
}

void MpiThread::finalize() noexcept {
  if (!initialized_here_ || has_failed_ || exits_with_error_ || !active_.empty()) return;
  MPI_Finalize();
}

void MpiThread::finish() noexcept {
  if (!owner_.is_this_one()) return;
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    if (!thread_.joinable()) return;
  }
  wake_.notify_one();
  // After a failure the thread may wait in MPI for a rank that has ended.
  has_failed_ || exits_with_error_ ? thread_.detach() : thread_.join();
}

}  // namespace ddp::backends::mpi
