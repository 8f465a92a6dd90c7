// DiLoCo's regions and their coordinator: what is lost while they begin, waits that end, and a
// coordinator that is killed.
#include <ddp/diloco.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/process_group.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "elastic/diloco_regions.h"
#include "launch/job/ports.h"
#include "local_sgd/diloco/elastic_leaders.h"
#include "support/error_of.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace diloco_coordinator_test {

using namespace diloco_regions;
using testing::error_of;

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

/// For what another thread of the test does.
void wait_until(const std::function<bool()>& holds, const char* what) {
  const bool came = testing::eventually(holds, std::chrono::seconds(30));
  TORCH_CHECK(came, "the test waited for: ", what);
}

/// A region that trains until `last`, which the one that joins sets.
Ended train_to_last(
    DiLoCo& diloco, const Tensors& parameters, int64_t region, std::atomic<int64_t>& last) {
  const int64_t begins = diloco.step() == 0 ? diloco.begin() : 0;
  if (begins > 0) last = begins + 20;
  while (last == 0) {
    pause();
    train_until(diloco, parameters, region, diloco.step() + 1);
  }
  train_until(diloco, parameters, region, last);
  diloco.finish();
  auto result = ended(diloco, parameters);
  result.begins = begins;
  return result;
}

/// Of one fragment of 3 elements.
ElasticLeaders::Settings settings_of_leaders(const TestCoordinator& coordinator) {
  ElasticLeaders::Settings settings;
  settings.coordinator = coordinator.address();
  settings.group = ProcessGroupOptions().backend("gloo");
  settings.text = "same";
  settings.fragment_sizes = {3};
  return settings;
}

void check_alike(const std::vector<Ended>& results) {
  for (const auto& result : results) {
    CHECK(at::equal(result.outer, results[0].outer));
    CHECK(at::equal(result.momentum, results[0].momentum));
    CHECK(result.round == results[0].round);
  }
}

}  // namespace diloco_coordinator_test

using namespace diloco_coordinator_test;

// It came before the others trained, and joins all the same.
TEST_CASE(
    "a region that is lost while all begin joins those that have begun",
    "[ranks][elastic][diloco]") {
  std::atomic<bool> has_begun{false}, has_broken{false};
  FaultyLink::Faults faults;
  faults.in_broadcast = [&](int rank, const at::Tensor& sent, c10d::Work& work) {
    if (rank != 1 || sent.scalar_type() != at::kFloat || has_broken.exchange(true)) return;
    work.wait();
    wait_until([&] { return has_begun.load(); }, "the first region begins");
    C10_THROW_ERROR(DistBackendError, "the link broke");
  };
  use_faulty_links(faults);
  const TestCoordinator coordinator(2, 1);
  std::atomic<int64_t> last{0};
  const auto results = run_ranks<Ended>(2, [&](const Rank& self) {
    const auto options = DiLoCoOptions().sync_every(4);
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, over_faulty_links(self, coordinator, options));
    has_begun = true;
    return train_to_last(diloco, parameters, self.rank, last);
  });
  check_alike(results);
  CHECK(std::min(results[0].begins, results[1].begins) == 0);
  CHECK(std::max(results[0].begins, results[1].begins) > 0);
}

TEST_CASE("a region may join for longer than the group's timeout", "[ranks][elastic][diloco]") {
  FaultyLink::Faults faults;
  faults.before_send = [](const at::Tensor& sent) {
    const bool is_state = sent.numel() >= 1 << 20;
    if (is_state) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  };
  use_faulty_links(faults);
  const TestCoordinator coordinator(2, 1);
  std::atomic<int64_t> last{0};
  const auto results = run_ranks<Ended>(2, [&](const Rank& self) {
    const auto own = over_faulty_links(
        self, coordinator, DiLoCoOptions().sync_every(4), std::chrono::seconds(4));
    const auto parameters = begin_parameters(0);
    std::string part(self.rank == 0 ? 9 << 20 : 0, 'x');  // three pieces
    auto diloco = std::make_unique<DiLoCo>(parameters, own);
    if (self.rank == 1) diloco.reset();
    if (!diloco) diloco = std::make_unique<DiLoCo>(parameters, own);
    diloco->add("part", part);
    auto result = train_to_last(*diloco, parameters, self.rank, last);
    result.part = static_cast<double>(part.size());
    return result;
  });
  check_alike(results);
  CHECK(results[1].begins > 0);
  CHECK(results[1].part == 9 << 20);
}

TEST_CASE("an offer of another round is given to no region", "[ranks][elastic][diloco]") {
  const TestCoordinator coordinator(2, 1);
  const auto rounds = run_ranks<int64_t>(2, [&](const Rank& self) {
    const auto settings = settings_of_leaders(coordinator);
    auto leaders = std::make_unique<ElasticLeaders>(settings, at::zeros({3}));
    leaders->met().get();
    if (self.rank == 1) {
      leaders.reset();
      leaders = std::make_unique<ElasticLeaders>(settings, at::zeros({3}));
      const auto joined = leaders->joined().get();
      TORCH_CHECK(joined.state.outer.equal(at::full({3}, 2.0F)), joined.state.outer);
      return joined.state.round;
    }
    const auto exchange = [&](int64_t offered, int64_t round) {
      const auto value = static_cast<float>(offered);
      leaders->offer({offered, at::full({3}, value), at::zeros({3}), ""});
      leaders->exchange({round, 4 * round, 0, at::ones({3})}).get();
    };
    wait_until([&] { return leaders->gives_state(); }, "a region watches");
    exchange(0, 1);
    exchange(2, 2);
    wait_until([&] { return !leaders->gives_state(); }, "the region has joined");
    return int64_t{0};
  });
  CHECK(rounds == std::vector<int64_t>{0, 2});
}

// Its thread ends because it has left: the limit after which it would leave without a word is far.
TEST_CASE("a region that waits for others leaves at once", "[ranks][elastic][diloco]") {
  TestCoordinator coordinator(2, 2);
  const bool is_killed = GENERATE(false, true);
  CAPTURE(is_killed);
  std::atomic<bool> is_called{false}, has_left{false};
  const auto why = run_ranks<std::string>(2, [&](const Rank& self) {
    auto settings = settings_of_leaders(coordinator);
    settings.leaves_within = std::chrono::seconds(20);
    auto leaders = std::make_unique<ElasticLeaders>(settings, at::zeros({3}));
    leaders->met().get();
    if (self.rank == 0) {
      wait_until([&] { return is_called.load(); }, "the other region calls for an exchange");
      leaders.reset();
      has_left = true;
      return std::string();
    }
    const auto mean = leaders->exchange({0, 4, 0, at::ones({3})});
    is_called = true;
    wait_until([&] { return has_left.load(); }, "the other region leaves");
    if (is_killed) coordinator.kill();
    leaders.reset();
    return error_of([&] { mean.get(); });
  });
  CHECK_THAT(
      why[1],
      ContainsText(
          is_killed ? "the coordinator cannot be reached" : "DiLoCo: this region has left"));
}

// Those that still train may need it: a coordinator that comes back waits for a majority.
TEST_CASE(
    "a region that has finished waits for a lost coordinator as the others do",
    "[ranks][elastic][diloco]") {
  TestCoordinator coordinator(2, 1);
  std::atomic<bool> has_finished{false};
  const auto waits = run_ranks<int>(2, [&](const Rank& self) {
    ElasticLeaders leaders(settings_of_leaders(coordinator), at::zeros({3}));
    leaders.met().get();
    if (self.rank == 1) {
      wait_until([&] { return has_finished.load(); }, "the other region finishes");
      coordinator.kill();
      return 1;
    }
    const auto finished = leaders.finish();
    has_finished = true;
    return finished.wait_for(std::chrono::seconds(8)) == std::future_status::timeout ? 1 : 0;
  });
  CHECK(waits == std::vector<int>{1, 1});
}

TEST_CASE("regions finish without a coordinator", "[ranks][elastic][diloco]") {
  TestCoordinator coordinator(2, 1);
  std::atomic<int> regions{0};
  std::atomic<bool> is_killed{false};
  const auto results = run_ranks<Ended>(2, [&](const Rank& self) {
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, place(self, 1, coordinator, DiLoCoOptions().sync_every(4)).options);
    train_until(diloco, parameters, self.rank, 6);
    ++regions;
    if (self.rank == 0) {
      wait_until([&] { return regions == 2; }, "both train");
      coordinator.kill();
      is_killed = true;
    }
    wait_until([&] { return is_killed.load(); }, "the coordinator is killed");
    train_until(diloco, parameters, self.rank, 20);
    diloco.finish();
    return ended(diloco, parameters);
  });
  check_alike(results);
  CHECK(results[0].round == 5);
}

TEST_CASE("regions train on while their coordinator is started again", "[ranks][elastic][diloco]") {
  const bool has_state = GENERATE(true, false);
  CAPTURE(has_state);
  const testing::TemporaryFolder folder;
  const launch::ReservedPort port;
  const auto start = [&] {
    return std::make_unique<TestCoordinator>(
        3, 1, port.port(), has_state ? folder.file("state") : "");
  };
  auto coordinator = start();
  std::atomic<bool> is_back{false};
  std::atomic<int64_t> rounds{0}, last{0};
  const auto others_exchange = [&] {
    const auto before = rounds.load();
    wait_until([&] { return rounds > before + 3; }, "the others exchange");
  };
  const auto results = run_ranks<std::pair<Ended, std::string>>(3, [&](const Rank& self) {
    const bool joins = self.rank == 2;
    const auto own = place(self, 1, *coordinator, DiLoCoOptions().sync_every(4)).options;
    const auto parameters = begin_parameters(0);
    // All begin; the third one leaves, and comes back to the coordinator that was started again.
    auto diloco = std::make_unique<DiLoCo>(parameters, own);
    Ended result;
    if (joins) {
      diloco.reset();
      others_exchange();
      coordinator->kill();
      others_exchange();
      coordinator = start();
      is_back = true;
      if (has_state) diloco = std::make_unique<DiLoCo>(parameters, own);
    }
    if (!diloco) return std::make_pair(result, std::string());
    const auto error = error_of([&] {
      while (!joins && !is_back) {
        pause();
        train_until(*diloco, parameters, self.rank, diloco->step() + 1);
        if (self.rank == 0) rounds = diloco->round();
      }
      result = train_to_last(*diloco, parameters, self.rank, last);
    });
    return std::make_pair(result, error);
  });
  if (!has_state) {
    for (const int rank : {0, 1}) {
      CHECK_THAT(
          results[rank].second,
          ContainsText("the coordinator was started again without what --state keeps"));
    }
    return;
  }
  std::vector<Ended> all;
  for (const auto& [result, error] : results) {
    CHECK(error == "");
    if (error.empty()) all.push_back(result);
  }
  check_alike(all);
  CHECK(results[2].first.begins > 0);
}

TEST_CASE(
    "a region whose ranks lose each other does not wait for other regions",
    "[ranks][elastic][diloco][errors]") {
  const bool is_in_finish = GENERATE(true, false);
  CAPTURE(is_in_finish);
  std::atomic<bool> breaks{false};
  FaultyLink::Faults faults;
  faults.in_broadcast = [&](int, const at::Tensor& sent, c10d::Work& work) {
    if (sent.scalar_type() != at::kLong || !breaks) return;
    work.wait();
    TORCH_CHECK(false, "the link broke");
  };
  use_faulty_links(faults);
  const TestCoordinator coordinator(2, is_in_finish ? 1 : 2);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> arrived{0}, left{0};
  const auto break_after = [&](int arrivals) {
    ++arrived;
    wait_until([&] { return arrived >= arrivals; }, "the region's other rank");
    breaks = true;
  };
  const auto errors = run_ranks<std::string>(3, [&](const Rank& self) {
    const bool is_alone = self.rank == 2;
    auto own = DiLoCoOptions().sync_every(4).group(ProcessGroupOptions().backend("gloo"));
    if (self.rank != 0) own.coordinator(coordinator.address());
    if (!is_alone) {
      own.local(make_process_group(
          ProcessGroupOptions().store(store).rank(self.rank).world_size(2).backend("faulty")));
    }
    const auto parameters = begin_parameters(0);
    if (is_alone && !is_in_finish) return std::string();
    if (!is_in_finish) break_after(2);
    const auto error = error_of([&] {
      DiLoCo diloco(parameters, own);
      train_until(diloco, parameters, self.rank, 3);
      if (is_alone) return wait_until([&] { return left == 2; }, "the others are left");
      break_after(2);
      diloco.finish();
    });
    ++left;
    return error;
  });
  for (const int rank : {0, 1}) CHECK_THAT(errors[rank], ContainsText("the link broke"));
  CHECK(errors[2] == "");
}

}  // namespace ddp
