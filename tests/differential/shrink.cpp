#include "differential/shrink.h"

namespace ddp::differential {

Program shrink(Program program, const Outcome& found, const std::function<Outcome(const Program&)>& run) {
  const auto stays = [&](const Program& candidate) {
    return excluded(candidate).empty() && run(candidate).kind == found.kind;
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    const auto all = program.chosen;
    for (const auto& [name, index] : all) {
      auto candidate = program;
      candidate.set(name, 0);
      // A value that others need goes with them.
      for (const auto& need : needs()) {
        if (!candidate.matches(need.of) || candidate.matches(need.needed)) continue;
        const auto dependent = need.of.substr(0, need.of.find('='));
        for (const auto& [other, unused] : all) {
          if (other.compare(0, dependent.size(), dependent) == 0) candidate.set(other, 0);
        }
      }
      if (candidate.chosen.size() < program.chosen.size() && stays(candidate)) {
        program = candidate;
        smaller = true;
      }
    }
  }
  return program;
}

}  // namespace ddp::differential
