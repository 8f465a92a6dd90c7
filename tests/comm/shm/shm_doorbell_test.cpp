// A ring wakes a thread that waits on a doorbell, before its timeout.
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include <unistd.h>

#include "comm/backends/shm/memory/segment.h"
#include "comm/backends/shm/sync/control_block.h"

#include "support/catch.h"

using ddp::backends::shm::Doorbell;
using ddp::backends::shm::Segment;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST_CASE("a ring wakes a waiter, through either mapping of a doorbell", "[shm][pure]") {
  const auto made = Segment::make(sizeof(Doorbell));
  auto* const doorbell = new (made->data()) Doorbell;
  const auto opened = Segment::open(getpid(), made->fd(), made->bytes());
  auto* const same = GENERATE(false, true) ? doorbell : reinterpret_cast<Doorbell*>(opened->data());

  std::atomic<bool> condition{false};
  bool held = false;
  const auto begin = Clock::now();
  std::thread waiter([&] { held = doorbell->wait_until([&] { return condition.load(); }, 10s); });
  while (doorbell->waiters() == 0) std::this_thread::yield();  // until it sleeps
  condition = true;
  same->ring();
  waiter.join();
  CHECK(held);
  CHECK(Clock::now() - begin < 5s);
  CHECK(doorbell->waiters() == 0);
}

TEST_CASE("a waiter without a ring returns after its timeout", "[shm][pure]") {
  const auto made = Segment::make(sizeof(Doorbell));
  auto* const doorbell = new (made->data()) Doorbell;
  const auto begin = Clock::now();
  CHECK_FALSE(doorbell->wait_until([] { return false; }, 100ms));
  const auto took = Clock::now() - begin;
  CHECK(took >= 100ms);
  CHECK(took < 5s);
}
