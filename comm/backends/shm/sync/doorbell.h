#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace ddp::backends::shm {

/// A futex in shared memory, on which the ranks of a host wait for each other's writes.
///
/// Thread safety: all members, from all processes that map it.
class Doorbell {
 public:
  /// Wakes all waiters. To be called after each write that a waiter may wait for.
  void ring();

  /// Spins a little, then sleeps until `condition` may hold. Returns as soon as the condition
  /// holds, or after `at_most`.
  ///
  /// \return  whether the condition holds.
  bool wait_until(c10::function_ref<bool()> condition, std::chrono::milliseconds at_most);

  /// How many threads sleep in wait_until(), of all processes.
  uint32_t waiters() const { return waiters_.load(); }

 private:
  std::atomic<uint32_t> rings_{0};  // the futex word: each ring that finds a waiter changes it
  std::atomic<uint32_t> waiters_{0};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

}  // namespace ddp::backends::shm
