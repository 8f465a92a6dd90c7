// The error texts of a group's ranks after a timeout.
#include <string>

#include <ATen/ops/ones.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>

#include "support/ranks.h"

#include "support/catch.h"

using ddp::testing::errors_of_ranks;
using ddp::testing::Rank;
using namespace std::chrono_literals;

TEST_CASE("a timeout names all ranks that had arrived", "[comm][ranks][errors][monitor]") {
  // Ranks report where they wait after two seconds, and some begin later.
  const ddp::testing::RanksOptions options{6s};
  const auto errors = errors_of_ranks(
      4,
      [](const Rank& self) {
        auto tensor = at::ones({4});
        ddp::all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
        const auto text = self.rank == 1 ? "" : ddp::problem_of([&] {
          ddp::all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
        });
        self.wait_until_others_end();
        TORCH_CHECK(self.rank == 1, text);
      },
      options);
  CHECK(errors[1].empty());
  for (const int rank : {0, 2, 3}) {
    CAPTURE(rank);
    CHECK_THAT(errors[rank], ContainsText("imed out"));
    CHECK_THAT(errors[rank], ContainsText("; ranks 0, 2, 3 had arrived, rank 1 had not"));
  }
}

TEST_CASE("a group may have a timeout of its own", "[comm][ranks][errors][monitor]") {
  const auto texts = ddp::testing::run_ranks<std::string>(2, [](const Rank& self) {
    const auto group = ddp::new_group({0, 1}, 4s, self.group);
    auto tensor = at::ones({1});
    ddp::all_reduce(tensor, group);
    const auto text =
        self.rank == 1 ? "" : ddp::problem_of([&] { ddp::all_reduce(tensor, group); });
    self.wait_until_others_end();
    return text;
  });
  CHECK_THAT(texts[0], ContainsText("imed out"));
}

TEST_CASE("ranks that give a group different timeouts throw", "[comm][ranks][errors][monitor]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ddp::new_group({0, 1}, 10s + 5s * self.rank, self.group);
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText("new_group: expected all ranks to call it alike") &&
                  ContainsText("[0, 1] and 10000 ms") && ContainsText("[0, 1] and 15000 ms")));
  for (const auto& error : errors_of_ranks(2, [](const Rank& self) {
         ddp::new_group({0, 1}, 0ms, self.group);
       })) {
    CHECK_THAT(error, ContainsText("expected a timeout of at least 1 ms, got 0 ms"));
  }
}
