// Ranks that all get the same samples.
#include <cstdlib>
#include <string>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

constexpr const char* kText = "got the same inputs on all 2 ranks in the first 3 averaged passes";

/// Where the samples of a rank's passes come from.
at::Tensor inputs_for(const std::string& way, int rank, int pass) {
  if (way == "own") return draw_values({6, 2}, static_cast<uint64_t>(10 * pass + rank));
  if (way == "constant") return at::ones({6, 2}, at::kDouble);
  if (way == "same until the third pass" && pass == 2) return draw_values({6, 2}, 20 + rank);
  // The check reads a sample of the large one.
  const auto drawn = draw_values({way == "large" ? 5000 : 6, 2}, static_cast<uint64_t>(pass));
  return way == "strided" ? drawn.t().contiguous().t() : drawn;
}

}  // namespace

TEST_CASE("inputs that are the same on all ranks are warned of, once", "[ranks][ddp]") {
  const auto [way, warnings] = GENERATE(table<std::string, int>(
      {{"own", 0},
       {"same", 1},
       {"large", 1},
       {"constant", 0},
       {"same until the third pass", 0},
       {"off", 0},
       {"evaluated", 0},
       {"no argument", 0},
       {"strided", 1}}));
  CAPTURE(way);
  const auto counts = run_ranks<int>(2, [&, way = way](const Rank& self) {
    const Warnings collected;
    auto net = make_linear(2);
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self).check_inputs(way != "off"));
    for (int pass = 0; pass < 8; ++pass) {
      const auto x = inputs_for(way, self.rank, pass);
      if (way == "evaluated") {
        const torch::NoGradGuard no_grad;
        model->forward(x);
        continue;
      }
      auto out =
          way == "no argument" ? model->run([&] { return net->forward(x); }) : model->forward(x);
      out.sum().backward();
    }
    return collected.count(kText);
  });
  CHECK(counts[0] == warnings);
  CHECK(counts[1] == 0);  // rank 0 says it
}

TEST_CASE("a pretended rank, which is alone, is not warned of its inputs", "[ddp][once]") {
  ::setenv("DDP_PRETEND", "0", /*overwrite=*/1);
  const Warnings collected;
  DistributedDataParallel model(
      make_linear(2), DistributedDataParallelOptions().process_group(make_process_group(
                          ProcessGroupOptions().rank(0).world_size(2).backend("gloo"))));
  for (int pass = 0; pass < 4; ++pass)
    model->forward(draw_values({6, 2}, static_cast<uint64_t>(pass)).to(at::kFloat))
        .sum()
        .backward();
  ::unsetenv("DDP_PRETEND");
  CHECK(collected.count("got the same inputs on all 2 ranks") == 0);
}

TEST_CASE("inputs are compared again after refresh, and warned of once", "[ranks][ddp]") {
  const auto counts = run_ranks<int>(2, [&](const Rank& self) {
    const Warnings collected;
    auto net = make_linear(2);
    net->to(at::kDouble);
    DistributedDataParallel model(net, in(self));
    for (int pass = 0; pass < 8; ++pass) {
      if (pass == 2 || pass == 5) model->refresh();
      model->forward(inputs_for("same", self.rank, pass)).sum().backward();
    }
    return collected.count(kText);
  });
  CHECK(counts[0] == 1);
}

}  // namespace ddp
