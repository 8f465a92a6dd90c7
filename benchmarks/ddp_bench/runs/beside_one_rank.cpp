#include "beside_one_rank.h"

#include <ddp/collectives.h>

#include "benchmarks/ddp_bench/engines/engine.h"

namespace ddp_bench {

BesideOneRank::BesideOneRank(const Options& options, const ddp::ProcessGroup& group)
    : options_(options), group_(group) {}

void BesideOneRank::run(const Step& alone, const Step& together, const Step& after_round) {
  take_turn(alone_, options_.warmup, alone);
  take_turn(together_, options_.warmup, together);
  alone_ = {};
  together_ = {};
  for (int round = 0; round < options_.rounds; ++round) {
    const bool alone_first = round % 2 == 0;
    if (alone_first) take_turn(alone_, options_.iters, alone);
    take_turn(together_, options_.iters, together);
    if (!alone_first) take_turn(alone_, options_.iters, alone);
    if (after_round) after_round();
  }
}

void BesideOneRank::take_turn(Times& times, int steps, const Step& step) const {
  std::vector<double> ms;
  for (int i = 0; i < steps; ++i) {
    ddp::barrier(group_);
    const auto start = Clock::now();
    step();
    ddp::barrier(group_);
    ms.push_back(milliseconds(start, Clock::now()));
  }
  times.of_rounds.push_back(quantile(ms, 0.5));
  times.of_steps.insert(times.of_steps.end(), ms.begin(), ms.end());
}

}  // namespace ddp_bench
