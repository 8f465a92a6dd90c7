// Forward passes without backward, and training in eval() mode.
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

// y = w * norm(x); throws when the test asks for it.
class NormalisedImpl : public torch::nn::Module {
 public:
  NormalisedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    w = register_parameter("w", torch::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!throws, "forward boom");
    return norm->forward(x) * w;
  }
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor w;
  bool throws = false;
};
TORCH_MODULE(Normalised);

at::Tensor batch(int rank, int step) {
  return torch::tensor({{0.0, 1.0}, {1.0, 3.0}, {4.0, 2.0}}) * (rank + 1 + 0.1 * step);
}

}  // namespace

TEST_CASE("rank 0 may evaluate a model with buffers alone, at any time", "[ranks][ddp]") {
  // Evaluates after this step: before, at and after the rebuild of buckets.
  const int when = GENERATE(0, 1, 2);
  const auto train = [&](bool evaluates) {
    return run_ranks<at::Tensor>(2, [&](const Rank& self) {
      Normalised net;
      DistributedDataParallel model(net, in(self).bucket_cap_mb(1e-6));
      for (int step = 0; step < 4; ++step) {
        net->zero_grad();
        model->forward(batch(self.rank, step)).pow(2).sum().backward();
        if (evaluates && step == when && self.rank == 0) {
          const torch::NoGradGuard no_grad;
          model->eval();
          for (int i = 0; i < 3; ++i) model->forward(batch(5, i));
          model->train();
        }
      }
      std::vector<at::Tensor> seen{net->norm->running_mean, net->norm->running_var};
      for (const auto& p : net->parameters()) seen.push_back(p.grad());
      return torch::cat(seen);
    });
  };
  const auto alone = train(true), never = train(false);
  for (int rank = 0; rank < 2; ++rank) CHECK(torch::equal(alone[rank], never[rank]));
}

TEST_CASE("an evaluation with gradients does not arm a local pass", "[ranks][ddp]") {
  const auto gradients = run_ranks<std::vector<float>>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self));
    const auto x = torch::full({1, 1}, self.rank + 1.0);
    std::vector<float> seen;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      if (self.rank == 0) {
        model->eval();
        model->forward(x);  // without torch::NoGradGuard
        model->train();
      }
      {
        const auto guard = model->no_sync();
        model->forward(x).sum().backward();
      }
      seen.push_back(net->weight.grad().item<float>());
      model->forward(x).sum().backward();
      seen.push_back(net->weight.grad().item<float>());
    }
    return seen;
  });
  CHECK(gradients[0] == std::vector<float>{1, 3, 1, 3, 1, 3});
  CHECK(gradients[1] == std::vector<float>{2, 3, 2, 3, 2, 3});
}

TEST_CASE("training in eval() mode averages gradients", "[ranks][ddp]") {
  const auto gradients = run_ranks<std::vector<float>>(2, [&](const Rank& self) {
    Normalised net;
    DistributedDataParallel model(net, in(self));
    model->eval();  // frozen statistics, as in fine-tuning
    std::vector<float> seen;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      if (self.rank == 1) model->forward(batch(0, step));  // without a backward pass
      model->forward(batch(self.rank, step)).sum().backward();
      seen.push_back(net->w.grad()[0].item<float>());
    }
    return seen;
  });
  CHECK(gradients[0] == gradients[1]);
}

TEST_CASE(
    "a failed collective reports an evaluation that threw before it", "[ranks][errors][ddp]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    Normalised net;
    DistributedDataParallel model(net, in(self));
    for (int step = 0; step < 2; ++step) model->forward(batch(0, step)).sum().backward();
    if (self.rank == 1) {
      model->eval();
      net->throws = true;
      model->forward(batch(0, 2));  // not caught: this rank ends
    }
    model->forward(batch(0, 2)).sum().backward();
  });
  CHECK_THAT(errors[0], ContainsText("forward threw on rank 1 of 2: forward boom"));
}

}  // namespace ddp
