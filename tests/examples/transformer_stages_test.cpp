// Runs the transformer's example as stages, beside every other way to cut it.
#include <chrono>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "transformer_runs.h"

#include "support/catch.h"

namespace {

using transformer_runs::Lines;
using transformer_runs::SharedRuns;

/// A model that 8 ranks can share in every way.
SharedRuns runs_of_eight_layers(const Lines& more = {}) {
  return SharedRuns(more, /*heads=*/8, /*layers=*/8);
}

}  // namespace

TEST_CASE(
    "a transformer on 2 x 2 x 2 ranks has the losses of one process, and goes on anywhere",
    "[examples][process]") {
  auto runs = runs_of_eight_layers();
  const double saving = runs.distance_of_saving(
      8, {"--dp", "2", "--tp", "2", "--pp", "2", "--fsdp", "--batch-size", "4", "--microbatches",
          "4"});
  {
    INFO(runs.output());
    REQUIRE(saving < 1.5e-5);
    CHECK(runs.samples_alike());
    CHECK(runs.sizes_alike());
  }
  const std::vector<std::pair<int, Lines>> shares = {
      {8, {"--dp", "1", "--tp", "8", "--batch-size", "8"}},
      {8, {"--dp", "4", "--pp", "2", "--batch-size", "2", "--microbatches", "2"}},
      {1, {"--batch-size", "8"}}};
  for (const auto& [ranks, share] : shares) {
    CAPTURE(ranks, share);
    const double distance = runs.distance_of_resumed(ranks, share);
    INFO(runs.output());
    CHECK(distance < 1.5e-5);
    CHECK(runs.samples_alike());
  }
}

TEST_CASE("a transformer has the same losses by every schedule", "[examples][process]") {
  auto runs = runs_of_eight_layers();
  const std::vector<std::pair<int, Lines>> shares = {
      {4, {"--pp", "4", "--schedule", "interleaved", "--batch-size", "8", "--microbatches", "8"}},
      {4,
       {"--pp", "2", "--tp", "2", "--schedule", "gpipe", "--batch-size", "4", "--accumulate", "2",
        "--microbatches", "3", "--checkpoint-activations"}},
      {4, {"--pp", "2", "--cp", "2", "--schedule", "eager", "--batch-size", "8"}}};
  for (const auto& [ranks, share] : shares) {
    CAPTURE(ranks, share);
    const double distance = runs.distance_of(ranks, share);
    INFO(runs.output());
    CHECK(distance < 1.5e-5);
    CHECK(runs.samples_alike());
    CHECK(runs.sizes_alike());
  }
}

TEST_CASE("stages of a transformer learn in bfloat16", "[examples][process]") {
  auto runs = runs_of_eight_layers({"--amp"});
  const double distance = runs.distance_of(2, {"--pp", "2", "--batch-size", "8"});
  INFO(runs.output());
  CHECK(distance < 5e-3);
}

TEST_CASE("a killed rank of a mesh ends all others and is named", "[examples][process][errors]") {
  const int killed = GENERATE(0, 3);
  auto job = ddp::testing::ddprun_sh(
      {"-n", "4"}, "echo pid $$; exec " TRANSFORMER_PROGRAM
                   " --pp 2 --tp 2 --width 32 --heads 4 --layers 2 --report-every 1");
  ddp::testing::Process running(job);
  running.read_until("step 3/1000");
  const auto label = "[" + std::to_string(killed) + "] pid ";
  const auto pids = ddp::testing::numbers_after(running.out(), label);
  REQUIRE(pids.size() == 1);
  const auto start = std::chrono::steady_clock::now();
  kill(pids.front(), SIGKILL);
  const auto ended = running.wait();
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start);
  const auto output = ended.out + ended.err;
  INFO(output);
  CHECK(seconds.count() < 30);
  CHECK(ended.code == 128 + SIGKILL);
  CHECK_THAT(
      output, ContainsText("rank " + std::to_string(killed) + " (pid ") &&
                  ContainsText("was killed by signal 9"));
}
