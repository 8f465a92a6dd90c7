// A rank that lives, and does not come to a collective.
#include <ddp/elastic.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/elastic_errors.h>
#include <torch/torch.h>

#include "elastic/test_coordinator.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr int64_t kSteps = 6;

struct HangResult {
  int64_t steps = 0;
  std::string fenced;
};

/// Counts steps. Rank 1 of the first generation hangs in the third one until `released`, which the
/// others set once they are done.
HangResult count_steps(const std::string& coordinator, std::atomic<bool>& released) {
  Elastic run(options_of_thread(
      coordinator, ProcessGroupOptions().backend("gloo").timeout(std::chrono::seconds(8))));
  int64_t count = 0;
  run.add("count", count);
  run.loop([&] {
    if (count == kSteps) return false;
    const auto generation = run.generation();
    const bool hangs = generation.number == 1 && generation.rank == 1 && count == 2;
    while (hangs && !released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    auto sum = torch::ones({1});
    all_reduce(sum, c10d::ReduceOp::SUM, run.process_group());
    run.step([&] { ++count; });
    return true;
  });
  released = true;
  return {count, ""};
}

}  // namespace

TEST_CASE("a rank that hangs in the user's code is accused, and replaced", "[ranks][elastic]") {
  std::atomic<bool> released{false};
  const TestCoordinator coordinator(/*max_ranks=*/3, /*min_ranks=*/3);
  const auto results = run_ranks<HangResult>(4, [&](const Rank& /*self*/) {  // one waits to join
    try {
      return count_steps(coordinator.address(), released);
    } catch (const Fenced& error) {
      return HangResult{0, error.what_without_backtrace()};
    }
  });
  const auto finished = std::count_if(
      results.begin(), results.end(), [](const HangResult& one) { return one.steps == kSteps; });
  CHECK(finished == 3);
  for (const auto& one : results) {
    if (one.steps == kSteps) continue;
    CHECK_THAT(one.fenced, ContainsText("is alive, but its training does not stop"));
  }
}

}  // namespace ddp
