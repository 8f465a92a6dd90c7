// The error of a failing rank if the store does not answer, or a peer makes no progress.
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/internal/group_monitor.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/monitor/job_monitor.h"
#include "comm/monitor/liveness_socket.h"
#include "comm/monitor/rank_report.h"
#include "comm/watched_store.h"
#include "support/error_of.h"

#include "support/catch.h"

using ddp::GroupMonitor;
using ddp::JobMonitor;
using ddp::LivenessSocket;
using namespace std::chrono_literals;

namespace {

const ddp::GlooDevices kOnLoopback{{}, "127.0.0.1"};

/// A store that does not answer while this object exists.
struct SilentStore {
  std::promise<void> end;
  std::shared_future<void> ended{end.get_future()};

  ~SilentStore() { end.set_value(); }

  c10::intrusive_ptr<c10d::Store> store() {
    return c10::make_intrusive<ddp::testing::WatchedStore>(
        c10::make_intrusive<c10d::HashStore>(), [ended = ended](auto&) { ended.wait(); });
  }
};

void set_text(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

JobMonitor::Setup job_of(int rank, const c10::intrusive_ptr<c10d::Store>& store) {
  JobMonitor::Setup setup;
  setup.rank = rank;
  setup.size = 3;
  setup.store = store;
  return setup;
}

GroupMonitor::Setup setup_of(const JobMonitor::Setup& job, std::chrono::milliseconds timeout) {
  GroupMonitor::Setup setup;
  setup.rank = job.rank;
  setup.size = job.size;
  setup.timeout = timeout;
  setup.job = std::make_shared<JobMonitor>(job);
  return setup;
}

/// Steps of which this rank has run one.
struct OneStep : ddp::SharedSteps {
  uint64_t count() const override { return 1; }
  const ddp::StepsText& text() const override { return text_; }
  void read(c10d::Store&) override {}
  std::optional<std::string> failure() const override { return {}; }

 private:
  const ddp::StepsText text_{"ran a step that", "Run as many"};
};

}  // namespace

TEST_CASE("a rank whose peer is gone waits for a silent store only once", "[comm][errors]") {
  SilentStore silent;
  auto setup = job_of(1, silent.store());
  setup.store_host = 0;
  setup.liveness = std::make_shared<LivenessSocket>(kOnLoopback);
  const LivenessSocket host(kOnLoopback);
  auto gone = std::make_unique<LivenessSocket>(kOnLoopback);
  setup.addresses = {host.address(), setup.liveness->address(), gone->address()};
  gone.reset();
  GroupMonitor monitor(setup_of(setup, 60s));

  const auto seen = ddp::testing::timed_error_of([&] {
    monitor.abort_on_error(
        [] { return std::string("reducing"); },
        [] { throw std::runtime_error("Connection closed by peer"); });
  });
  CHECK_THAT(
      seen.error,
      ContainsText("reducing failed on rank 1 of 3: Connection closed by peer; rank 2 of 3 has "
                   "ended, or left the process group."));
  CHECK(seen.seconds < 4);  // two seconds of waiting, once
}

TEST_CASE("a wait that is over when another rank's failure is read does not throw it", "[comm]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  GroupMonitor fails(setup_of(job_of(1, store), 60s));
  fails.fail("rank 1 is out of memory");
  GroupMonitor waits(setup_of(job_of(0, store), 60s));
  const auto where = [] { return std::string("summing"); };
  // Over is what arrived meanwhile, which shows in the last and shortest look.
  waits.wait_until([](std::chrono::milliseconds at_most) { return at_most < 100ms; }, where);
  CHECK_THAT(
      ddp::testing::error_of(
          [&] { waits.wait_until([](std::chrono::milliseconds) { return false; }, where); }),
      ContainsText("rank 1 is out of memory"));
}

TEST_CASE("a rank that makes no progress is not explained by uneven steps", "[comm][errors]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < 3; ++rank) {
    set_text(*store, ddp::report_key(rank), "\t");
  }
  const auto timed_out = [](GroupMonitor& monitor) {
    return ddp::testing::error_of([&] {
      monitor.abort_on_error(
          [] { return std::string("learning what the ranks will do"); },
          [] { throw std::runtime_error("Timed out"); });
    });
  };
  // Rank 1 has no input left, in a join: it runs no step.
  GroupMonitor trains(setup_of(job_of(0, store), 1s));
  const auto steps = std::make_shared<OneStep>();
  trains.add_steps(steps);
  set_text(*store, ddp::report_key(1), "\t\tlearning what the ranks will do\t0");
  CHECK_THAT(
      timed_out(trains),
      Catch::Matchers::StartsWith(
          "learning what the ranks will do failed on rank 0 of 3: Timed out; ranks "
          "0, 1 had arrived, rank 2 had not"));
}

TEST_CASE(
    "a timeout's error comes soon after it, without the ranks that did not come",
    "[comm][errors]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int rank = 0; rank < 3; ++rank) set_text(*store, ddp::report_key(rank), "\t");
  set_text(*store, ddp::report_key(1), "\t\tsumming\t0");
  set_text(*store, "reader/1", "1");
  auto job = job_of(0, store);
  job.store_host = 0;
  constexpr auto kTimeout = 4s;
  GroupMonitor monitor(setup_of(job, kTimeout));
  const auto where = [] { return std::string("summing"); };
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  const auto wait = [&](std::chrono::milliseconds at_most) {
    std::this_thread::sleep_for(at_most);
    monitor.abort_on_error(where, [&] {
      if (std::chrono::steady_clock::now() >= end) throw std::runtime_error("Timed out");
    });
    return false;
  };

  const auto seen = ddp::testing::timed_error_of([&] { monitor.wait_until(wait, where); });
  CHECK_THAT(seen.error, ContainsText("Timed out; ranks 0, 1 had arrived, rank 2 had not"));
  // It has asked for another rank's reason since the wait was reported: not for two seconds more.
  CHECK(seen.seconds < 5.5);
  const auto left = ddp::testing::timed_error_of([&] { monitor.leave_job(); });
  // Rank 1 has read the reason, and rank 2 will not: no wait of two seconds for it.
  CHECK(left.seconds < 1);
}
