// How busy a GPU is, by the driver's libraries. A library that stands in for both is built beside.
#include "stats/device_utilization.h"

#include <dlfcn.h>

#include <optional>
#include <string>
#include <vector>

#include <ddp/reduction_stats.h>

#include "stats/step_recorder.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

const DriverLibraries kStandIn{DDP_DRIVER_STAND_IN, DDP_DRIVER_STAND_IN};

template <typename Value>
Value& variable_of_stand_in(const char* name) {
  void* const library = dlopen(DDP_DRIVER_STAND_IN, RTLD_LAZY);
  return *static_cast<Value*>(dlsym(library, name));
}

/// A function of the stand-in returns errors for as long as this lives.
class Failing {
 public:
  explicit Failing(const char* function) { name() = function; }
  ~Failing() { name() = ""; }

 private:
  static const char*& name() { return variable_of_stand_in<const char*>("stand_in_fails"); }
};

/// The steps that a recorder takes with that function.
std::vector<StepStats> recorded(int steps, std::function<std::optional<int>()> utilization) {
  StepRecorder recorder(/*rank=*/0, /*every=*/4, 0, {}, nullptr, std::move(utilization));
  for (int step = 1; step <= steps; ++step) {
    recorder.begin_forward(step);
    recorder.armed(0);
    recorder.begin_backward();
    recorder.autograd_done();
    recorder.end_pass(false);
  }
  return recorder.steps();
}

}  // namespace

TEST_CASE("a GPU's utilization is that of CUDA's index", "[pure][stats]") {
  const auto first = device_utilization(0, kStandIn), second = device_utilization(1, kStandIn);
  REQUIRE((first && second));
  CHECK(first() == std::optional(37));
  CHECK(second() == std::optional(99));
  CHECK_FALSE(device_utilization(2, kStandIn));
}

TEST_CASE("without the driver no utilization is known", "[pure][stats]") {
  const std::string missing = "libno_such_driver.so.1";
  CHECK_FALSE(device_utilization(0, {missing, missing}));
  CHECK_FALSE(device_utilization(0, {missing, DDP_DRIVER_STAND_IN}));
  CHECK_FALSE(device_utilization(0, {DDP_DRIVER_STAND_IN, missing}));
  CHECK_FALSE(device_utilization(0, {DDP_DRIVER_STAND_IN, "libc.so.6"}));  // has no such function
  CHECK_NOTHROW(device_utilization(0));                                    // of this machine
}

TEST_CASE("a driver that returns errors tells no utilization", "[pure][stats]") {
  for (const char* function :
       {"cuDeviceGet", "cuDeviceGetPCIBusId", "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2"}) {
    const Failing failing(function);
    CAPTURE(function);
    CHECK_FALSE(device_utilization(0, kStandIn));
  }
  const auto utilization = device_utilization(0, kStandIn);
  REQUIRE(utilization);
  {
    const Failing failing("nvmlDeviceGetUtilizationRates");
    CHECK(utilization() == std::nullopt);
    CHECK(recorded(12, utilization).back().device_utilization == std::nullopt);
  }
  CHECK(utilization() == std::optional(37));
}

TEST_CASE("sampled steps after the tenth ask the driver once each", "[pure][stats]") {
  const auto utilization = device_utilization(0, kStandIn);
  auto& calls = variable_of_stand_in<int>("stand_in_calls");
  calls = 0;
  const auto steps = recorded(20, utilization);
  CHECK(calls == 3);
  REQUIRE(steps.size() == 13);
  for (const auto& step : steps) {
    CHECK(step.device_utilization == (step.step > 10 ? std::optional(37) : std::nullopt));
  }
}

TEST_CASE("the utilization of steps is in the summary and goes to all ranks", "[ranks][stats]") {
  ReductionStats stats{recorded(20, nullptr)};
  CHECK_THAT(summary(stats), !ContainsText("GPU"));
  stats.steps.back().device_utilization = 87;
  CHECK_THAT(summary(stats), ContainsText("; the GPU is busy 87% of the time"));
  const auto gathered = run_ranks<std::vector<StepStats>>(2, [&](const Rank& self) {
    auto own = stats;
    own.steps.back().device_utilization = 50 + self.rank;
    return all_gather_stats(own, self.group).steps;
  });
  for (const auto& steps : gathered) {
    REQUIRE(steps.size() == 26);
    CHECK(steps[12].device_utilization == std::optional(50));
    CHECK(steps[13].device_utilization == std::nullopt);
    CHECK(steps[25].device_utilization == std::optional(51));
    CHECK(steps[25].bytes == 0);
  }
}

}  // namespace ddp
