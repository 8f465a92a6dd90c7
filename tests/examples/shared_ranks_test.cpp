// The code that the examples share, on ranks that are threads.
#include <c10/util/Exception.h>

#include "examples/common/on_all_ranks.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::testing::Rank;

}  // namespace

TEST_CASE(
    "a step that fails on some ranks stops all, and the first one reports why",
    "[examples][ranks][errors]") {
  const auto errors = ddp::testing::errors_of_ranks(3, [](const Rank& self) {
    const auto step = [&] { TORCH_CHECK(self.rank == 0, "no disk on ", self.rank); };
    examples::on_all_ranks(step, self.group);
  });
  CHECK(errors[0] == "another rank failed");
  CHECK(errors[1] == "no disk on 1");
  CHECK(errors[2] == "another rank failed");
}

TEST_CASE("a step that succeeds everywhere stops no rank", "[examples][ranks]") {
  const auto errors = ddp::testing::errors_of_ranks(
      3, [](const Rank& self) { examples::on_all_ranks([] {}, self.group); });
  for (const auto& error : errors) CHECK(error.empty());
}
