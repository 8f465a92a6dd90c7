#include "control_block.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ddp::backends::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than a collective of a few bytes takes once all ranks have announced it. Shorter than a
// thread that computes on the same core would notice.
constexpr std::chrono::microseconds kSpin{30};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` does nothing on most cores
#endif
}

bool spin_until(c10::function_ref<bool()> condition) {
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return false;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds at_most) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  const timespec timeout{seconds.count(), (at_most - seconds).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

}  // namespace

void Doorbell::ring() {
  if (waiters_.load() == 0) return;
  rings_.fetch_add(1);
  ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Doorbell::wait_until(c10::function_ref<bool()> condition, std::chrono::milliseconds at_most) {
  if (spin_until(condition)) return true;
  const auto end = Clock::now() + at_most;
  // Incremented before the last check of the condition: a rank that writes after that check then
  // sees a waiter and rings.
  waiters_.fetch_add(1);
  bool holds = false;
  while (true) {
    const uint32_t seen = rings_.load();
    holds = condition();
    const auto left = end - Clock::now();
    if (holds || left <= Clock::duration::zero()) break;
    futex_wait(rings_, seen, left);
  }
  waiters_.fetch_sub(1);
  return holds;
}

}  // namespace ddp::backends::shm
