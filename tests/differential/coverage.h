// Which pairs of values have run together.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "differential/choice.h"

namespace ddp::differential {

class Coverage {
 public:
  void add(const Program& program);
  /// Pairs that the rules allow, and no program had.
  std::vector<std::pair<std::string, std::string>> unseen() const;

 private:
  std::set<std::pair<std::string, std::string>> seen_;
};

}  // namespace ddp::differential
