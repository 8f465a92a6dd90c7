#include "bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ddp::backends::shm {
namespace {

using Clock = std::chrono::steady_clock;

// Longer than a collective of a few bytes takes when all ranks have come, shorter than what a
// thread that computes on the same core would miss.
constexpr std::chrono::microseconds kSpin{30};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
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

void ring(Board& board) {
  if (board.sleepers.load() == 0) return;
  board.bell.fetch_add(1);
  ::syscall(SYS_futex, &board.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool sleep_until(
    Board& board, c10::function_ref<bool()> condition, std::chrono::milliseconds at_most) {
  if (spin_until(condition)) return true;
  const auto end = Clock::now() + at_most;
  // Said before the last look: who writes after that look sees a sleeper, and rings.
  board.sleepers.fetch_add(1);
  bool holds = false;
  while (true) {
    const uint32_t seen = board.bell.load();
    holds = condition();
    const auto left = end - Clock::now();
    if (holds || left <= Clock::duration::zero()) break;
    futex_wait(board.bell, seen, left);
  }
  board.sleepers.fetch_sub(1);
  return holds;
}

}  // namespace ddp::backends::shm
