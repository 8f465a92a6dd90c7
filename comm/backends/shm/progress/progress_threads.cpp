#include "progress_threads.h"

#include <atomic>
#include <chrono>
#include <system_error>
#include <utility>

#include <ddp/internal/ranges.h>

#include "progress_engine.h"

namespace ddp::backends::shm {
namespace {

// How often the threads make progress while no thread waits.
constexpr std::chrono::milliseconds kPollInterval{2};
constexpr size_t kThreads = 2;
constexpr unsigned kRoundsPerCheck = ProgressEngine::kCheckPeers / kPollInterval;

/// The present work of a progress thread.
struct ThisThread {
  ProgressThreads* owner = nullptr;  // null on other threads
  const ProgressEngine* engine = nullptr;
  int callbacks = 0;      // that it is in, one within the other
  bool detached = false;  // it ends after its callback
};
thread_local ThisThread this_thread;

}  // namespace

ProgressThreads& ProgressThreads::of_this_process() {
  static std::atomic<ProgressThreads*> current{new ProgressThreads};
  auto* threads = current.load();
  if (!threads->owner_.is_this_one()) {
    auto* own = new ProgressThreads;  // leaks if another thread was faster
    if (current.compare_exchange_strong(threads, own)) threads = own;
  }
  return *threads;
}

void ProgressThreads::add(std::shared_ptr<ProgressEngine> engine) {
  const std::lock_guard lock(mutex_);
  while (threads_.size() < kThreads) start_thread();
  entries_.push_back(std::make_shared<Entry>(Entry{std::move(engine)}));
}

void ProgressThreads::remove(const ProgressEngine& engine) {
  Lock lock(mutex_);
  const auto found =
      find_if(entries_, [&](const auto& entry) { return entry->engine.get() == &engine; });
  if (found == entries_.end()) return;
  const auto entry = *found;
  entry->removed = true;
  entries_.erase(found);
  const bool in_own_callback = this_thread.engine == &engine;
  if (in_own_callback) detach_this_thread();
  released_.wait(lock, [&] { return entry->users == (in_own_callback ? 1 : 0); });
  if (entries_.empty()) join(std::move(lock));
}

// A callback that destroys its group may go on after that, so its thread is not joined.
void ProgressThreads::detach_this_thread() {
  const auto own = find_if(
      threads_, [](const auto& thread) { return thread.get_id() == std::this_thread::get_id(); });
  if (own == threads_.end()) return;
  own->detach();
  threads_.erase(own);
  this_thread.detached = true;
  if (!entries_.empty()) try_start_threads(kThreads);
}

void ProgressThreads::join(Lock lock) {
  ++generation_;
  detach_this_thread();
  auto ended = std::exchange(threads_, {});
  lock.unlock();
  changed_.notify_all();
  for (auto& thread : ended) thread.join();
}

void ProgressThreads::wake_one() {
  const std::lock_guard lock(mutex_);
  if (idle_ > 0) changed_.notify_one();
}

void ProgressThreads::start_thread() {
  threads_.push_back(ddp::start_thread(
      [this, generation = generation_, place = started_] { run(generation, place); }));
  ++started_;
}

// Without another thread the callbacks that wait still make progress for what they wait for.
void ProgressThreads::try_start_threads(size_t wanted) {
  try {
    while (threads_.size() < wanted) start_thread();
  } catch (const std::system_error&) {
    // There are no more threads.
  }
}

bool ProgressThreads::must_end(uint64_t generation) const {
  return generation != generation_ || this_thread.detached;
}

bool ProgressThreads::has_pending() const {
  return any_of(entries_, [](const auto& entry) { return entry->engine->has_pending(); });
}

void ProgressThreads::run(uint64_t generation, size_t place) {
  this_thread.owner = this;
  Lock lock(mutex_);
  for (unsigned round = 1; !must_end(generation); ++round) {
    if (threads_.size() > kThreads + in_callbacks_) return detach_this_thread();
    wait_for_progress(lock, generation, place);
    const auto entries = entries_;
    for (const auto& entry : entries) {
      if (must_end(generation)) return;
      if (entry->removed || !entry->engine->has_pending()) continue;
      use(lock, entry, [&](ProgressEngine& engine) {
        engine.progress();
        if (round % kRoundsPerCheck == 0) engine.check_peers();
      });
    }
  }
}

/// Waits on the doorbell of one engine for which threads may wait without it; the other engines are
/// looked at every few milliseconds. The threads choose different engines.
void ProgressThreads::wait_for_progress(Lock& lock, uint64_t generation, size_t place) {
  const auto ends = [&] { return must_end(generation); };
  if (!has_pending()) {
    ++idle_;
    changed_.wait(lock, [&] { return ends() || has_pending(); });
    --idle_;
    return;
  }
  std::vector<EntryPtr> awaited;
  for (const auto& entry : entries_) {
    if (entry->engine->has_pending() && entry->engine->has_futures()) awaited.push_back(entry);
  }
  if (awaited.empty()) {
    changed_.wait_for(lock, kPollInterval, ends);
  } else {
    use(lock, awaited[place % awaited.size()],
        [](ProgressEngine& engine) { engine.wait_until_progress(kPollInterval); });
  }
}

template <typename Use>
void ProgressThreads::use(Lock& lock, const EntryPtr& entry, const Use& use_engine) {
  ++entry->users;
  lock.unlock();
  this_thread.engine = entry->engine.get();
  use_engine(*entry->engine);
  this_thread.engine = nullptr;
  lock.lock();
  --entry->users;
  released_.notify_all();
}

ProgressThreads::CallbackScope::CallbackScope() {
  if (this_thread.owner == nullptr || this_thread.callbacks++ > 0) return;
  auto& threads = *this_thread.owner;
  const std::lock_guard lock(threads.mutex_);
  ++threads.in_callbacks_;
  if (threads.idle_ > 0) threads.changed_.notify_all();  // to make progress instead
  if (!threads.entries_.empty()) threads.try_start_threads(threads.in_callbacks_ + 1);
}

ProgressThreads::CallbackScope::~CallbackScope() {
  if (this_thread.owner == nullptr || --this_thread.callbacks > 0) return;
  const std::lock_guard lock(this_thread.owner->mutex_);
  --this_thread.owner->in_callbacks_;
}

}  // namespace ddp::backends::shm
