// Whoever sleeps on a board is woken by a ring, not by the end of the time.
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include <unistd.h>

#include "comm/backends/shm/bell.h"
#include "comm/backends/shm/segment.h"

#include "support/catch.h"

using ddp::backends::shm::Board;
using ddp::backends::shm::ring;
using ddp::backends::shm::Segment;
using ddp::backends::shm::sleep_until;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST_CASE("a ring wakes who sleeps, through either mapping of a board", "[shm][pure]") {
  const auto made = Segment::make(Board::bytes_for(0));
  auto* const board = new (made->data()) Board;
  const auto opened = Segment::open(getpid(), made->fd(), made->bytes());
  auto* const same = GENERATE(false, true) ? board : reinterpret_cast<Board*>(opened->data());

  std::atomic<bool> condition{false};
  const auto begin = Clock::now();
  std::thread sleeper([&] {
    CHECK(sleep_until(
        *board, [&] { return condition.load(); }, 10s));
  });
  while (board->sleepers.load() == 0) std::this_thread::yield();
  std::this_thread::sleep_for(50ms);  // until it does not spin any more
  condition = true;
  ring(*same);
  sleeper.join();
  CHECK(Clock::now() - begin < 5s);
  CHECK(board->sleepers.load() == 0);
}

TEST_CASE("who sleeps for nothing gives up in time", "[shm][pure]") {
  const auto made = Segment::make(Board::bytes_for(0));
  auto* const board = new (made->data()) Board;
  const auto begin = Clock::now();
  CHECK_FALSE(sleep_until(
      *board, [] { return false; }, 100ms));
  const auto took = Clock::now() - begin;
  CHECK(took >= 100ms);
  CHECK(took < 5s);
}
