// What the examples share, on ranks that are threads.
#include <limits>
#include <vector>

#include <torch/torch.h>

#include "examples/common/on_all_ranks.h"
#include "examples/common/replicas.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::testing::Rank;

std::vector<std::vector<int64_t>> unlike_first(
    const std::function<std::vector<at::Tensor>(int rank)>& tensors) {
  return ddp::testing::run_ranks<std::vector<int64_t>>(3, [&](const Rank& self) {
    return examples::ranks_unlike_first(tensors(self.rank), self.group);
  });
}

}  // namespace

TEST_CASE("equal bits are equal, whatever the numbers", "[examples][ranks]") {
  const auto unlike = unlike_first([](int) {
    return std::vector<at::Tensor>{
        torch::full({3, 2}, std::numeric_limits<double>::quiet_NaN(), torch::kDouble),
        torch::ones(5)};
  });
  for (const auto& ranks : unlike) CHECK(ranks.empty());
}

TEST_CASE("one differing bit names its rank on all ranks", "[examples][ranks]") {
  const auto unlike = unlike_first([](int rank) {
    return std::vector<at::Tensor>{torch::ones(5), torch::tensor({1.0, rank == 1 ? -0.0 : 0.0})};
  });
  for (const auto& ranks : unlike) CHECK(ranks == std::vector<int64_t>{1});
}

TEST_CASE(
    "a step that fails on some ranks stops all, and the first says why",
    "[examples][ranks][errors]") {
  const auto errors = ddp::testing::errors_of_ranks(3, [](const Rank& self) {
    const auto step = [&] { TORCH_CHECK(self.rank == 0, "no disk on ", self.rank); };
    examples::on_all_ranks(step, self.group);
  });
  CHECK(errors[0] == "another rank failed");
  CHECK(errors[1] == "no disk on 1");
  CHECK(errors[2] == "another rank failed");
}

TEST_CASE("a step that succeeds everywhere stops nobody", "[examples][ranks]") {
  const auto errors = ddp::testing::errors_of_ranks(
      3, [](const Rank& self) { examples::on_all_ranks([] {}, self.group); });
  for (const auto& error : errors) CHECK(error.empty());
}
