#include "differential/shrink.h"

#include <algorithm>
#include <optional>

namespace ddp::differential {

namespace {

/// The program with a linear layer in place of another one.
std::optional<Program> with_plain_layer(const Program& program, const std::string& name) {
  if (name.compare(0, 5, "layer") != 0 || program.is(name, "none|linear")) return std::nullopt;
  auto plain = program;
  plain.set(name, "linear");
  return plain;
}

}  // namespace

bool contains(const Program& program, const Program& smaller) {
  const auto has = [&](const std::string& value) {
    return value == "layer=linear" || program.matches(value);
  };
  const auto taken = smaller.taken();
  return std::all_of(taken.begin(), taken.end(), has);
}

Program shrink(
    Program program, const Outcome& found, const std::function<Outcome(const Program&)>& run) {
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
      } else if (const auto plain = with_plain_layer(program, name); plain && stays(*plain)) {
        program = *plain;
        smaller = true;
      }
    }
  }
  return program;
}

}  // namespace ddp::differential
