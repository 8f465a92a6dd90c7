// Measures the cost of recording a collective, for the error when ranks wait in vain, and of
// tagging it for Gloo.
#include <cstdint>
#include <cstdio>
#include <vector>

#include <ATen/ops/ones.h>

#include "comm/calls/call_history.h"
#include "in_turns.h"
#include "micro.h"

namespace {

/// The mean time of a call, in nanoseconds.
template <typename Call>
double nanoseconds(const Call& call) {
  constexpr int kCalls = 1'000'000;
  return 1e6 / kCalls * benchmarks::milliseconds([&] {
           for (int i = 0; i < kCalls; ++i) call();
         });
}

void measure_call_history(int rounds) {
  const std::vector<at::Tensor> tensors{at::ones({1000})};
  const auto describe = [&] {
    return ddp::describe_call(ddp::CollectiveKind::AllReduce, tensors, /*reduction=*/0);
  };
  ddp::CallHistory history;
  uint64_t tags = 0;
  std::vector<benchmarks::Way> ways{
      {"described and kept",
       [&] { return nanoseconds([&] { history.add(ddp::CallHistory::Lane::kCpu, describe()); }); }},
      {"described and tagged", [&] { return nanoseconds([&] { tags += describe().hash(); }); }}};
  benchmarks::run_in_turns(ways, /*warm_up=*/1, rounds);
  benchmarks::print_ways("a collective", "ns", ways);
  std::printf("(tags: %d)\n", tags != 0);  // so that the compiler does not drop them
}

}  // namespace

void benchmarks::add_call_history(CLI::App& app) {
  auto* command = app.add_subcommand("call_history", "A collective that is kept, and tagged.");
  static int rounds = 9;
  command->add_option("--rounds", rounds, "In turns")->check(CLI::Range(1, 1000000));
  command->callback([] { measure_call_history(rounds); });
}
