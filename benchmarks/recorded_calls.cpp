// What it costs to keep a collective for ranks that wait in vain, and to tag it for Gloo.
//
//     recorded_calls
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <ATen/ops/ones.h>

#include "comm/call_history.h"
#include "median.h"

namespace {

constexpr int kCalls = 1000000;

/// Nanoseconds of each of kCalls calls, the median of some rounds.
template <typename Call>
double nanoseconds(const Call& call) {
  std::vector<double> rounds;
  for (int round = 0; round < 9; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    rounds.push_back(took.count() / kCalls);
  }
  return benchmarks::median(rounds);
}

}  // namespace

int main() {
  const std::vector<at::Tensor> tensors{at::ones({1000})};
  const auto describe = [&] {
    return ddp::describe_call(ddp::CollectiveKind::kAllReduce, tensors, /*reduction=*/0);
  };
  ddp::CallHistory history;
  uint64_t tags = 0;
  const auto kept = nanoseconds([&] { history.add(ddp::CallHistory::Lane::kCpu, describe()); });
  const auto tagged = nanoseconds([&] { tags += describe().hash(); });
  std::printf("a collective: kept in %.0f ns, tagged in %.0f ns (%d)\n", kept, tagged, tags != 0);
}
