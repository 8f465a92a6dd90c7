#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <ddp/internal/owner_process.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp::backends::shm {

class ProgressEngine;

/// The threads of this process that make progress for all its engines while no other thread does.
/// There are two, and one more for each of them that is in a callback while no other is free: a
/// callback may wait.
///
/// The first engine starts the threads, and the last one ends them.
///
/// Thread safety: all members.
class ProgressThreads {
 public:
  /// Never destroyed. A process that was forked gets its own.
  static ProgressThreads& of_this_process();

  /// \throws std::system_error  if a thread cannot start.
  void add(std::shared_ptr<ProgressEngine> engine);

  /// Returns once none of the threads, except the calling one, uses the engine.
  void remove(const ProgressEngine& engine);

  /// Wakes one thread that sleeps because no engine had a pending collective.
  void wake_one();

  /// To exist while a callback runs. Does nothing on other threads than these.
  class CallbackScope {
   public:
    CallbackScope();
    ~CallbackScope();
    CallbackScope(const CallbackScope&) = delete;
    CallbackScope& operator=(const CallbackScope&) = delete;
  };

 private:
  struct Entry {
    std::shared_ptr<ProgressEngine> engine;
    int users = 0;  // of the threads
    bool removed = false;
  };
  using EntryPtr = std::shared_ptr<Entry>;
  using Lock = std::unique_lock<std::mutex>;

  void start_thread();
  void try_start_threads(size_t wanted);
  void run(uint64_t generation, size_t place);
  bool must_end(uint64_t generation) const;
  bool has_pending() const;
  void wait_for_progress(Lock& lock, uint64_t generation, size_t place);
  template <typename Use>
  void use(Lock& lock, const EntryPtr& entry, const Use& use_engine);
  void detach_this_thread();
  void join(Lock lock);

  const OwnerProcess owner_{};
  std::mutex mutex_;                  // guards the members below
  std::condition_variable changed_;   // the threads wait on it
  std::condition_variable released_;  // remove() waits on it
  std::vector<EntryPtr> entries_;
  std::vector<std::thread> threads_;
  uint64_t generation_ = 0;  // changes when the last engine ends the threads
  size_t started_ = 0;       // threads, ever
  size_t in_callbacks_ = 0;  // threads
  int idle_ = 0;             // threads
};

}  // namespace ddp::backends::shm
