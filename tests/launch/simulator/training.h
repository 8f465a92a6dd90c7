// What the user's threads do in a simulated job, and the groups of their generations.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "launch/simulator/network.h"
#include "launch/simulator/process.h"

namespace ddp::testing {

/// Trains to the last step. A step is applied once all members of the generation contributed to it.
class Training {
 public:
  Training(Chance& chance, const Processes& processes, const Network& network)
      : chance_(chance), processes_(processes), network_(network) {}

  void set_last_step(int64_t step) { last_step_ = step; }
  void act(Process& process);
  /// All processes have ended.
  void begin_again();

  int64_t newest_generation() const { return newest_; }
  int64_t steps() const { return steps_; }

 private:
  std::vector<const Process*> others_of(const Process& process) const;
  void give_up_if_broken(Process& process);
  void enter(Process& process);
  void train_step(Process& process);
  void apply(Process& process, int64_t generation, int64_t step);

  Chance& chance_;
  const Processes& processes_;
  const Network& network_;
  int64_t last_step_ = 0;
  int64_t newest_ = 0;  // generation that applied a step
  int64_t steps_ = 0;
  std::map<int64_t, std::map<ProcessId, int64_t>> contributions_;  // the last step, by generation
  std::map<std::pair<int64_t, int64_t>, uint64_t> before_step_;    // by generation and step: state
  std::set<std::pair<int64_t, int64_t>> pauses_;                   // generation, step
};

}  // namespace ddp::testing
