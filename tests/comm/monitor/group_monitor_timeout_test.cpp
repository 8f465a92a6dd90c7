// The error texts of a group's ranks after a timeout.
#include <string>

#include <ATen/ops/ones.h>
#include <ddp/collectives.h>
#include <ddp/internal/error_text.h>

#include "support/ranks.h"

#include "support/catch.h"

using ddp::testing::errors_of_ranks;
using ddp::testing::Rank;
using namespace std::chrono_literals;

TEST_CASE("a timeout names all ranks that had arrived", "[comm][ranks][errors][monitor]") {
  ddp::testing::RanksOptions options;
  options.collective_timeout = 3s;  // longer than the time until ranks report where they wait
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
