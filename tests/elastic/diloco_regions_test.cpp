// Regions of DiLoCo that are lost, leave and join, as threads, beside a simulation in one process.
#include <ddp/diloco.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/process_group.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "elastic/diloco_regions.h"
#include "elastic/usage.h"
#include "support/error_of.h"

#include "support/catch.h"

namespace ddp {

using namespace diloco_regions;
using testing::error_of;

TEST_CASE("regions that may leave train as those that may not", "[ranks][elastic][diloco]") {
  const auto options = GENERATE(
      DiLoCoOptions(), DiLoCoOptions().fragments(3).overlap(2).wire(DiLoCoWire::Int8),
      DiLoCoOptions().error_feedback(true).overlap(3).mix(0.25).wire(DiLoCoWire::Int8));
  CAPTURE(options.fragments(), options.overlap());
  constexpr int64_t kSteps = 20;
  auto full = options;
  full.sync_every(6);
  const TestCoordinator coordinator(3, 3);
  const auto both = run_ranks<std::pair<Ended, Ended>>(3, [&](const Rank& self) {
    const auto train = [&](const DiLoCoOptions& own) {
      const auto parameters = begin_parameters(self.rank);
      DiLoCo diloco(parameters, own);
      TORCH_CHECK(diloco.begin() == 0, "begins late");
      train_until(diloco, parameters, self.rank, kSteps);
      diloco.finish();
      if (own.regions() == nullptr) {
        const auto error =
            error_of([&] { train_until(diloco, parameters, self.rank, kSteps + 10); });
        TORCH_CHECK(error.find("expected no step after finish()") != error.npos, error);
      }
      return ended(diloco, parameters);
    };
    auto fixed = full;
    fixed.regions(self.group);
    // Slots are given in the order of coming: regions may have other places than ranks.
    return std::make_pair(train(fixed), train(place(self, 1, coordinator, full).options));
  });
  for (const auto& [fixed, elastic] : both) {
    CHECK(at::equal(elastic.outer, both[0].second.outer));
    CHECK(at::equal(elastic.momentum, both[0].second.momentum));
    CHECK(elastic.round == fixed.round);
    CHECK(elastic.regions == std::vector<int64_t>{0, 1, 2});
  }
}

TEST_CASE("a region leaves, and another one joins", "[ranks][elastic][diloco]") {
  const auto options = GENERATE(
      DiLoCoOptions(), DiLoCoOptions().fragments(2), DiLoCoOptions().fragments(2).overlap(2),
      DiLoCoOptions().overlap(4).mix(0.5));
  const int per_region = options.fragments() == 1 ? 2 : 1;
  CAPTURE(options.fragments(), options.overlap());
  constexpr int kRegions = 3;
  constexpr int64_t kLeaves = 17;  // with no exchange under way
  auto full = options;
  full.sync_every(6).wire(DiLoCoWire::Float32);
  const TestCoordinator coordinator(kRegions, 1);
  std::atomic<int64_t> last{0};  // step; 0: the region has not come back yet
  const auto results = run_ranks<Ended>(kRegions * per_region, [&](const Rank& self) {
    const auto [region, own] = place(self, per_region, coordinator, full);
    // By the order in which they came, the first has any slot: all begin alike.
    const auto make_parameters = [] { return begin_parameters(0); };
    int64_t begins = 0;
    double part = 0;
    if (region == 2) {
      const auto parameters = make_parameters();
      DiLoCo diloco(parameters, own);
      diloco.add("part", part);
      diloco.begin();
      train_until(diloco, parameters, region, kLeaves);
    }
    const auto parameters = make_parameters();
    if (region == 2) {
      for (const auto& parameter : parameters) parameter.fill_(7);
    }
    DiLoCo diloco(parameters, own);
    if (region != 2) part = 5;
    diloco.add("part", part);
    begins = diloco.begin();
    if (region == 2) last = begins + 20;
    while (last == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      train_until(diloco, parameters, region, diloco.step() + 1);
    }
    train_until(diloco, parameters, region, last);
    diloco.finish();
    auto result = ended(diloco, parameters);
    result.begins = begins;
    result.part = part;
    return result;
  });
  const auto& newcomer = results.back();
  CHECK(newcomer.begins > kLeaves);
  CHECK(newcomer.begins % (6 / full.fragments()) == 0);
  const auto expected =
      simulate(kRegions, full, newcomer.begins + 20, {{2, {kLeaves, newcomer.begins}}});
  for (size_t rank = 0; rank < results.size(); ++rank) {
    CAPTURE(rank);
    const auto& result = results[rank];
    CHECK(at::equal(result.outer, results[0].outer));
    CHECK(at::equal(result.momentum, results[0].momentum));
    CHECK(result.round == results[0].round);
    CHECK(result.part == 5);
    const auto& simulated = expected[rank / static_cast<size_t>(per_region)];
    // The roundings of float32 add up over the steps, of which a late newcomer sees more.
    const double error = (result.parameters - simulated).abs().max().item<double>();
    CHECK(error < 1e-5 * std::max(1.0, static_cast<double>(newcomer.begins) / 300));
  }
}

TEST_CASE("a region that misses a mean gets it from the others", "[ranks][elastic][diloco]") {
  const int regions = GENERATE(2, 3);  // two swap what more of them gather
  std::atomic<int> exchanges_until_then{3};
  // Rank 1 loses its link once: just after an exchange that the others have finished.
  FaultyLink::Faults faults;
  faults.in_gather = faults.in_send = [&](int rank, const at::Tensor& sent, c10d::Work& work) {
    const bool is_exchange = sent.scalar_type() == at::kByte;
    if (rank != 1 || !is_exchange || --exchanges_until_then != 0) return;
    work.wait();
    C10_THROW_ERROR(DistBackendError, "the link broke");
  };
  use_faulty_links(faults);
  constexpr int64_t kSteps = 20;
  const auto options =
      DiLoCoOptions().sync_every(6).fragments(2).overlap(1).wire(DiLoCoWire::Float32);
  const TestCoordinator coordinator(regions, regions);
  const auto results = run_ranks<Ended>(regions, [&](const Rank& self) {
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, over_faulty_links(self, coordinator, options));
    train_until(diloco, parameters, self.rank, kSteps);
    diloco.finish();
    return ended(diloco, parameters);
  });
  CHECK(exchanges_until_then < 0);
  const auto expected = simulate(regions, options, kSteps);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    CHECK(at::equal(results[rank].outer, results[0].outer));
    CHECK(results[rank].round == 6);
    CHECK(at::allclose(results[rank].parameters.to(at::kDouble), expected[rank], 0, 1e-6));
  }
}

// CI has 6 changes; DDP_ELASTIC_CHANGES=100: more.
TEST_CASE("regions that come and go leave nothing", "[ranks][elastic][diloco]") {
  const char* given = std::getenv("DDP_ELASTIC_CHANGES");
  const int changes = given == nullptr ? 6 : std::atoi(given);
  const TestCoordinator coordinator(2, 1);
  std::atomic<bool> is_over{false};
  std::vector<testing::Usage> usages;
  run_ranks<int>(
      2, {std::chrono::seconds(20), std::chrono::seconds(20 + 2 * changes)}, [&](const Rank& self) {
        const auto own = place(self, 1, coordinator, DiLoCoOptions().sync_every(2)).options;
        const auto parameters = begin_parameters(0);
        for (int change = 0; self.rank == 1 && change < changes; ++change) {
          DiLoCo diloco(parameters, own);
          train_until(diloco, parameters, self.rank, diloco.begin() + 4);
          if (change > 0) usages.push_back(testing::usage());
        }
        if (self.rank == 1) is_over = true;
        if (self.rank == 1) return 0;
        DiLoCo diloco(parameters, own);
        while (!is_over) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          train_until(diloco, parameters, self.rank, diloco.step() + 1);
        }
        return 0;
      });
  const auto first = usages.at(usages.size() / 2);
  const auto last = usages.back();
  CAPTURE(first.memory, last.memory);
  CHECK(last.descriptors <= first.descriptors + 2);
  CHECK(last.threads <= first.threads + 2);
  CHECK(last.mappings <= first.mappings + 8);
  CHECK(last.memory <= first.memory + 10 * 1024);
}

TEST_CASE("a region that is late for an exchange is left out", "[ranks][elastic][diloco][errors]") {
  const TestCoordinator coordinator(2, 1);
  const auto errors = run_ranks<std::string>(4, [&](const Rank& self) {
    const auto [region, own] =
        place(self, 2, coordinator, DiLoCoOptions().sync_every(4), std::chrono::seconds(3));
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, own);
    const auto train = [&, number = region](int64_t last) {
      train_until(diloco, parameters, number, last);
    };
    return error_of([&, number = region] {
      train(6);
      if (number == 1) std::this_thread::sleep_for(std::chrono::seconds(6));
      train(12);
      diloco.finish();
    });
  });
  for (size_t rank = 0; rank < 2; ++rank) CHECK(errors[rank] == "");
  for (size_t rank = 2; rank < 4; ++rank) {
    CHECK_THAT(errors[rank], ContainsText("expected this region's next exchange within 3000 ms"));
  }
}

TEST_CASE("a part that is cut over a region is refused", "[ranks][elastic][diloco][errors]") {
  const TestCoordinator coordinator(1, 1);
  const auto errors = run_ranks<std::string>(2, [&](const Rank& self) {
    const auto parameters = begin_parameters(0);
    DiLoCo diloco(parameters, place(self, 2, coordinator, DiLoCoOptions()).options);
    DistributedDataParallel model(
        torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(self.group));
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(model, torch::optim::SGDOptions(0.1));
    return error_of([&] { diloco.add("optimizer", zero); });
  });
  CHECK_THAT(errors, Each(ContainsText("has whole, got a ZeroRedundancyOptimizer. Leave it out")));
}

TEST_CASE("what regions that may leave refuse", "[ranks][elastic][diloco][errors]") {
  const std::string kind = GENERATE("options", "steps", "both", "no begin");
  CAPTURE(kind);
  const TestCoordinator coordinator(2, 1);
  std::atomic<bool> has_joined{false};
  const auto errors = run_ranks<std::string>(2, [&](const Rank& self) {
    auto own = place(self, 1, coordinator, DiLoCoOptions().sync_every(4)).options;
    if (kind == "options" && self.rank == 1) own.mix(0.5);
    if (kind == "both") own.regions(self.group);
    const auto parameters = begin_parameters(0);
    return error_of([&] {
      auto diloco = std::make_unique<DiLoCo>(parameters, own);
      if (kind == "steps" && self.rank == 1) diloco->set_step(4);
      train_until(*diloco, parameters, self.rank, 12);
      if (kind != "no begin") return;
      if (self.rank == 0) {
        while (!has_joined) train_until(*diloco, parameters, self.rank, diloco->step() + 4);
        return;
      }
      const auto end = c10::make_scope_exit([&] { has_joined = true; });
      diloco.reset();
      DiLoCo joins(parameters, own);
      train_until(joins, parameters, self.rank, 12);
    });
  });
  if (kind == "no begin") {
    CHECK(errors[0] == "");
    CHECK_THAT(errors[1], ContainsText("expected begin() before the first step"));
    return;
  }
  CHECK_THAT(
      errors, Each(ContainsText(
                  kind == "options" ? "expected the same options and parameters in all regions"
                  : kind == "both"  ? "expected regions() or coordinator(), got both"
                                    : "expected all regions at the same step and round")));
}

}  // namespace ddp
