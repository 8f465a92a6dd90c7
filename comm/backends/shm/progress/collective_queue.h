#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "../sync/control_block.h"

namespace ddp::backends::shm {

/// One collective as this rank calls it.
struct Call {
  using Buffers = std::vector<std::byte*>;

  Descriptor descriptor;
  /// The owner of the memory that other ranks access. If the collective fails, it exists as long as
  /// the groups that use the arena.
  std::shared_ptr<const void> memory;
  /// Counts from the completion of the collective before this one. Negative: the group's timeout.
  std::chrono::milliseconds timeout{-1};
  /// Runs before the first reduce step. Empty: equal descriptors suffice, and there is one round.
  std::function<Agreement(const Buffers& buffers)> check_agreement;
  /// Does this rank's share of the work, once all ranks have announced the collective. buffers[r]
  /// is rank r's memory at the offset of its descriptor. Runs once per round, after all ranks have
  /// finished the round before.
  std::function<void(const Buffers& buffers)> reduce_step;
  /// Copies results out of shared memory, once all ranks have finished their reduce step.
  std::function<void()> copy_out;
  /// Runs last, with the error if the collective failed. It runs without a lock: it may start other
  /// collectives and wait for them.
  std::function<void(std::exception_ptr)> on_complete;

  void keep(at::Tensor shared) { memory = std::make_shared<at::Tensor>(std::move(shared)); }
};

/// A collective that this rank has announced but not completed.
struct Pending {
  uint64_t number;
  std::chrono::milliseconds timeout;
  std::chrono::steady_clock::time_point deadline;  // valid for the first in the queue only
  Call call;
  std::exception_ptr error;
  uint64_t rounds_left = 0;  // 0 until the ranks have agreed on their number
};
using PendingPtr = std::unique_ptr<Pending>;

/// The pending collectives of a rank, in the order of their numbers. Those at the front have
/// finished their reduce step.
///
/// Thread safety: all members. One thread at a time makes progress: calls next(), front(),
/// mark_reduced() and pop_completed(). A `Pending*` stays valid until that thread pops it, or until
/// abort().
class CollectiveQueue {
 public:
  /// \throws c10::DistBackendError  after abort(), with its reason.
  void push(PendingPtr pending);

  /// The next collective to run its reduce step, and the next one to complete; each may be null.
  struct Next {
    Pending* to_reduce = nullptr;
    Pending* to_complete = nullptr;
  };
  Next next();
  Pending* front();

  /// Records that `to_reduce` has finished its reduce step.
  void mark_reduced() { ++reduced_; }
  /// Removes `to_complete`, and starts the timeout of the next collective.
  PendingPtr pop_completed();
  /// Removes the front, with abort()'s reason as its error. Null before abort(), and if the queue
  /// is empty.
  PendingPtr pop_aborted();

  /// How many collectives were removed.
  uint64_t completed() const { return completed_.load(); }

  /// Fails the queue. The first reason is kept.
  void abort(const std::string& why);
  bool is_aborted() const { return aborted_; }
  std::string abort_reason();

 private:
  std::mutex mutex_;  // guards all members except the atomics and reduced_
  std::deque<PendingPtr> pending_;
  size_t reduced_ = 0;  // of pending_, from the front; used by the thread that makes progress
  std::string abort_reason_;
  std::atomic<bool> aborted_{false};  // whether abort_reason_ is set
  std::atomic<uint64_t> completed_{0};
};

}  // namespace ddp::backends::shm
