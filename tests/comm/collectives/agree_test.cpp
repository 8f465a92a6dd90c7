#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/internal/gather_strings.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using ddp::testing::error_of;
using ddp::testing::Rank;
using ddp::testing::run_ranks;

namespace {

std::string joined_texts(const std::vector<std::string>& by_rank) {
  std::string all;
  for (const auto& text : by_rank) all += text;
  return all;
}

}  // namespace

TEST_CASE("ranks that agree get each other's texts", "[comm][ranks]") {
  const int size = GENERATE(1, 3);
  const auto texts = run_ranks<std::vector<std::string>>(size, [](const Rank& self) {
    return ddp::agree(
        std::to_string(self.rank), self.group, "comparing", [](const auto&) { return ""; });
  });
  const std::vector<std::string> all{"0", "1", "2"};
  for (const auto& by_rank : texts) {
    CHECK(by_rank == std::vector<std::string>(all.begin(), all.begin() + size));
  }
}

TEST_CASE("a rank's problem is thrown on every rank of a usable group", "[comm][ranks][errors]") {
  const int failing = GENERATE(0, 1, 2);
  const auto errors = run_ranks<std::string>(3, [&](const Rank& self) {
    const auto problem = self.rank == failing ? "no space left" : "";
    auto error = error_of<ddp::AgreedError>(
        [&] { ddp::agree(problem, self.group, "comparing", joined_texts); });
    ddp::barrier(self.group);
    return error;
  });
  CHECK(errors == std::vector<std::string>(3, "no space left"));
}
