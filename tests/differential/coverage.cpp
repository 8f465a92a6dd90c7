#include "differential/coverage.h"

namespace ddp::differential {

void Coverage::add(const Program& program) {
  const auto taken = program.taken();
  for (size_t i = 0; i < taken.size(); ++i) {
    for (size_t j = i + 1; j < taken.size(); ++j) seen_.emplace(taken[i], taken[j]);
  }
}

std::vector<std::pair<std::string, std::string>> Coverage::unseen() const {
  std::vector<std::pair<std::string, std::string>> result;
  for (const auto& pair : pairs()) {
    if (seen_.count(pair) == 0) result.push_back(pair);
  }
  return result;
}

}  // namespace ddp::differential
