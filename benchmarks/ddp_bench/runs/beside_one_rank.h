#pragma once

#include <functional>
#include <vector>

#include <ddp/process_group.h>

#include "benchmarks/ddp_bench/options.h"
#include "benchmarks/ddp_bench/statistics.h"

namespace ddp_bench {

/// Times steps of rank 0 alone, and of all ranks together, in turns. A step lasts until all ranks
/// have ended theirs; the other ranks leave the machine to rank 0 while it trains alone.
class BesideOneRank {
 public:
  using Step = std::function<void()>;

  BesideOneRank(const Options& options, const ddp::ProcessGroup& group);

  /// \param alone  does something on rank 0 only. \param together  on all ranks.
  /// \param after_round  of the rounds that count; empty: nothing.
  ///
  /// Collective: yes.
  void run(const Step& alone, const Step& together, const Step& after_round = {});

  double alone_ms() const { return quantile(alone_.of_steps, 0.5); }
  double together_ms() const { return quantile(together_.of_steps, 0.5); }
  /// The time alone over the time together.
  PairedRatio speedup() const { return paired_ratio(alone_.of_rounds, together_.of_rounds); }

 private:
  struct Times {
    std::vector<double> of_steps;
    std::vector<double> of_rounds;  // the median of a round's steps
  };

  void take_turn(Times& times, int steps, const Step& step) const;

  const Options& options_;
  ddp::ProcessGroup group_;
  Times alone_, together_;
};

}  // namespace ddp_bench
