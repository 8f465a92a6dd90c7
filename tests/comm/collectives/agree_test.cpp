#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/internal/gather_strings.h>

#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

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

TEST_CASE("strings of any lengths are gathered", "[comm][ranks]") {
  // Around the number of bytes that travel with the length; all ranks, or some, beyond it.
  const auto lengths = GENERATE(
      std::vector<size_t>{0, 0, 0}, std::vector<size_t>{0, 1015, 1016},
      std::vector<size_t>{1016, 1017, 0}, std::vector<size_t>{5000, 1017, 20000});
  const auto text_of_rank = [&](size_t rank) {
    std::string text(lengths[rank], '\0');
    for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 31 + rank);
    return text;
  };
  const auto gathered = run_ranks<std::vector<std::string>>(3, [&](const Rank& self) {
    return ddp::all_gather_strings(text_of_rank(static_cast<size_t>(self.rank)), self.group);
  });
  const std::vector<std::string> expected{text_of_rank(0), text_of_rank(1), text_of_rank(2)};
  for (const auto& by_rank : gathered) CHECK(by_rank == expected);
}
