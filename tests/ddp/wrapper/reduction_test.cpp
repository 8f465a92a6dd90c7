// Reductions of gradients: mean, sum, and weighted by samples.
#include <cmath>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/one_weight.h"
#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {

using namespace testing;

TEST_CASE("each reduction gives one process's gradient for its kind of loss", "[ranks][ddp]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted);
  const bool as_views = GENERATE(false, true);
  const auto data = torch::arange(7, at::kFloat).view({7, 1});
  const auto seen = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    DistributedDataParallel model(
        make_linear(), in(self).reduction(reduction).gradient_as_bucket_view(as_views));
    // Five samples on one rank, two on the other.
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
  // count_samples() is for one pass; the next counts the rows of its argument again.
  for (const auto& gradients : seen) CHECK(gradients == std::vector<float>{5, 1});
}

TEST_CASE("samples whose gradients were discarded do not count", "[ranks][ddp]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    // Until the buckets are rebuilt, in a forward pass.
    for (int i = 0; i < 2; ++i) step(model, 1);
    if (self.rank == 0) {
      const auto guard = model->no_sync();
      model->forward(torch::full({9, 1}, 5.0)).mean().backward();
    }
    return step(model, self.rank == 0 ? 2 : 4);  // begins with zero_grad()
  });
  for (const float gradient : seen) CHECK(gradient == 3);
}

TEST_CASE("a rank without samples adds zeros, even when its gradient is NaN", "[ranks][ddp]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    if (self.rank == 1) model->count_samples(0);
    return step(model, self.rank == 0 ? 2 : NAN);
  });
  for (const float gradient : seen) CHECK(gradient == 2);
}

TEST_CASE("samples count where a backward pass goes through their forward pass", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    const auto& weight = model->module()->weight;
    const auto forward = [&](int64_t rows, double x) {
      return model->forward(torch::full({rows, 1}, x)).mean();
    };
    const double x = self.rank == 0 ? 2 : 4;
    const int64_t rows = self.rank == 0 ? 3 : 1;
    std::vector<float> gradients;
    // A batch that is skipped; its graph is destroyed at once, or stays.
    for (const bool stays : {false, true}) {
      at::Tensor skipped = forward(9 * rows, 100);
      if (!stays) skipped.reset();
      gradients.push_back(step(model, x));
    }
    // Two forward passes before one backward pass.
    model->zero_grad();
    ((rows * forward(rows, x) + forward(1, x)) / (rows + 1)).backward();
    gradients.push_back(weight.grad().item<float>());
    // Accumulation, with a skipped forward pass between.
    model->zero_grad();
    {
      const auto guard = model->no_sync();
      forward(5, 100);
      (forward(rows, x) * rows / (rows + 1)).backward();
    }
    (forward(1, x) / (rows + 1)).backward();
    gradients.push_back(weight.grad().item<float>());
    return gradients;
  });
  // First the mean of one row each; then, twice, of four rows of 2 and two rows of 4.
  for (const auto& gradients : seen) {
    REQUIRE(gradients.size() == 4);
    for (size_t i = 0; i < 4; ++i) CHECK(gradients[i] == Approx(i < 2 ? 3 : 16.0 / 6));
  }
}

TEST_CASE("samples dropped before a join have no weight in it", "[ranks][join]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self).reduction(Reduction::SampleWeighted));
    for (int i = 0; i < 2; ++i) step(model, 1);
    if (self.rank == 1) {
      {
        const auto guard = model->no_sync();
        model->forward(torch::full({6, 1}, 5.0)).mean().backward();
      }
      model->zero_grad();
    }
    model->join([&] {
      if (self.rank == 1) return;
      model->zero_grad();
      model->forward(torch::full({2, 1}, 3.0)).mean().backward();
    });
    return net->weight.grad().item<float>();
  });
  CHECK(seen[0] == 3);
}

TEST_CASE("count_samples applies to the next forward pass, of any kind", "[ranks][ddp]") {
  const auto seen = run_ranks<float>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self).reduction(Reduction::SampleWeighted));
    model->count_samples(self.rank == 0 ? 9 : 1);
    {
      const torch::NoGradGuard no_grad;
      model->forward(torch::ones({1, 1}));
    }
    return step(model, self.rank == 0 ? 2 : 4);
  });
  for (const float gradient : seen) CHECK(gradient == 3);
}

TEST_CASE("a rank without samples sends no row of a sparse gradient", "[ranks][ddp]") {
  const auto seen = run_ranks<at::Tensor>(2, [](const Rank& self) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    torch::nn::init::ones_(table->weight);
    DistributedDataParallel model(table, in(self).reduction(Reduction::SampleWeighted));
    if (self.rank == 1) model->count_samples(0);
    const auto rows = torch::tensor({self.rank, self.rank + 1});
    (model->forward(rows).sum() * (self.rank == 0 ? 1.0 : NAN)).backward();
    return table->weight.grad().to_dense();
  });
  const auto expected = torch::tensor({{1.0f, 1.0f}, {1.0f, 1.0f}, {0.0f, 0.0f}, {0.0f, 0.0f}});
  for (const auto& gradient : seen) CHECK(torch::equal(gradient, expected));
}

TEST_CASE("every forward pass decides anew whether its gradients are averaged", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    DistributedDataParallel model(make_linear(), in(self));
    const auto& weight = model->module()->weight;
    const auto x = torch::full({1, 1}, self.rank + 1.0);
    std::vector<float> gradients;
    for (int i = 0; i < 3; ++i) {
      model->zero_grad();
      model->forward(x);  // without backward
      {
        const auto guard = model->no_sync();
        model->forward(x).sum().backward();
      }
      gradients.push_back(weight.grad().item<float>());
      model->forward(x).sum().backward();
      gradients.push_back(weight.grad().item<float>());
    }
    return gradients;
  });
  CHECK(seen[0] == std::vector<float>{1, 3, 1, 3, 1, 3});
  CHECK(seen[1] == std::vector<float>{2, 3, 2, 3, 2, 3});
}

}  // namespace ddp
