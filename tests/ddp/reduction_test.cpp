// What a gradient becomes: the mean, the sum, or weighted by samples.
#include <cmath>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/one_weight.h"
#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {

using testing::in;
using testing::make_linear;
using testing::Rank;
using testing::run_ranks;
using testing::step;

TEST_CASE("reductions give one process's gradient for their losses", "[ranks][ddp]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted);
  const bool as_views = GENERATE(false, true);
  const auto data = torch::arange(7, at::kFloat).view({7, 1});
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    DistributedDataParallel model(
        make_linear(), in(self).reduction(reduction).gradient_as_bucket_view(as_views));
    // Five samples here, two there.
    const auto mine = self.rank == 0 ? data.narrow(0, 0, 5) : data.narrow(0, 5, 2);
    std::vector<float> gradients;
    for (int i = 0; i < 3; ++i) {
      model->zero_grad();
      const auto y = model->forward(mine);
      (reduction == Reduction::Sum ? y.sum() : y.mean()).backward();
      gradients.push_back(model->module()->weight.grad().item<float>());
    }
    return gradients;
  });
  const float expected = reduction == Reduction::Sum              ? 21
                         : reduction == Reduction::SampleWeighted ? 3
                                                                  : (2.0f + 5.5f) / 2;
  for (const auto& gradients : seen) {
    for (const float gradient : gradients) CHECK(gradient == Approx(expected));
  }
}

TEST_CASE("samples can be counted by the caller", "[ranks][errors][ddp]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    model->count_samples(self.rank == 0 ? 3 : 1);
    return std::vector<float>{step(model, self.rank == 0 ? 4 : 8), step(model, self.rank * 2)};
  });
  // Weighted once, and then by the rows of the argument again.
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{5, 1});
}

TEST_CASE("samples whose gradients were thrown away do not count", "[ranks][ddp]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    for (int i = 0; i < 2; ++i) step(model, 1);  // past the rebuild, which is in a forward pass
    if (self.rank == 0) {
      const auto guard = model->no_sync();
      model->forward(torch::full({9, 1}, 5.0)).mean().backward();
    }
    return step(model, self.rank == 0 ? 2 : 4);  // begins with zero_grad()
  });
  for (const float gradient : seen) CHECK(gradient == 3);
}

TEST_CASE("a rank without samples has no say, whatever its gradient is", "[ranks][ddp]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    if (self.rank == 1) model->count_samples(0);
    return step(model, self.rank == 0 ? 2 : NAN);
  });
  for (const float gradient : seen) CHECK(gradient == 2);
}

}  // namespace ddp
