#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../sync/agreement.h"
#include "../sync/control_block.h"

namespace ddp::backends::shm {

/// One collective as this rank calls it.
struct Call {
  using Buffers = std::vector<std::byte*>;

  Descriptor descriptor;
  /// Counts from the completion of the collective before this one. Below 0: the group's timeout.
  std::chrono::milliseconds timeout{-1};
  /// Before the first reduce step. Empty: equal descriptors are enough, and there is one round.
  std::function<Agreement(const Buffers& buffers)> agree;
  /// This rank's share of the work, once all ranks have announced the collective. buffers[r] is
  /// rank r's memory at the offset of its descriptor. Runs once a round, after all ranks have done
  /// the round before.
  std::function<void(const Buffers& buffers)> reduce_step;
  /// Copies results out of shared memory, once all ranks have done their reduce step.
  std::function<void()> copy_out;
  /// Runs last, with the error if the collective failed. It runs without a lock: it may start other
  /// collectives and wait for them.
  std::function<void(std::exception_ptr)> on_complete;
};

/// A collective that this rank has announced and not completed.
struct Pending {
  uint64_t number;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point deadline;  // of the first in the queue alone
  Call call;
  std::exception_ptr error;
  uint64_t rounds_left = 0;  // 0 until the ranks agree on how many there are
};
using PendingPtr = std::unique_ptr<Pending>;

/// The pending collectives of a rank, in the order of their numbers. Those at the front have done
/// their reduce step.
///
/// Thread safety: all members. One thread at a time makes progress: calls next(), front(),
/// mark_reduced() and pop_completed(). A `Pending*` stays valid until that thread pops it, or until
/// abort().
class CollectiveQueue {
 public:
  /// \throws c10::DistBackendError  after abort(), with its reason.
  void push(PendingPtr pending);

  /// The collective whose reduce step is next, and the one that completes next; each may be empty.
  struct Next {
    Pending* to_reduce = nullptr;
    Pending* to_complete = nullptr;
  };
  Next next();
  Pending* front();

  /// Says that `to_reduce` has done its reduce step.
  void mark_reduced() { ++reduced_; }
  /// Takes `to_complete` out. The time of the next one begins.
  PendingPtr pop_completed();
  /// Takes the front out with abort()'s reason as its error. Empty before abort(), and when nothing
  /// is left.
  PendingPtr pop_aborted();

  /// How many collectives were taken out.
  uint64_t completed() const { return completed_.load(); }

  /// The first reason stays.
  void abort(const std::string& why);
  bool is_aborted() const { return aborted_; }

  /// For the threads that make progress while nobody waits.
  ///
  /// Waits as long as the queue is empty and open.
  /// \return  whether it was empty.
  bool wait_if_empty();
  /// Waits until the queue is closed, for at most `at_most`.
  void wait_closed(std::chrono::milliseconds at_most);
  bool is_closed();
  /// Wakes one thread in wait_if_empty().
  void wake_one();

  /// Lets all threads go. Pending collectives stay.
  ///
  /// \return  whether this was the first call.
  bool close();

 private:
  std::mutex mutex_;  // guards all but the atomics and reduced_
  std::deque<PendingPtr> pending_;
  size_t reduced_ = 0;  // of pending_, from the front; of the thread that makes progress
  std::string abort_reason_;
  bool closed_ = false;
  int idle_threads_ = 0;
  std::condition_variable changed_;
  std::atomic<bool> aborted_{false};  // whether abort_reason_ is set
  std::atomic<uint64_t> completed_{0};
};

}  // namespace ddp::backends::shm
