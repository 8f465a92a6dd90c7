// LBFGS decides by the loss how often it runs the closure, and how far it steps.
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

struct Fit {
  std::vector<at::Tensor> parameters;
  int closures = 0;
};

torch::nn::Sequential wavy_net() {
  torch::nn::Sequential net(torch::nn::Linear(2, 6), torch::nn::Tanh(), torch::nn::Linear(6, 1));
  net->to(at::kDouble);
  const at::NoGradGuard no_grad;
  int64_t seed = 0;
  for (auto& p : net->parameters()) {
    p.copy_(torch::arange(seed, seed + p.numel(), at::kDouble).mul(0.7).sin().view_as(p));
    seed += p.numel();
  }
  return net;
}

// Inputs [first, last). They are far apart, so that ranks have different losses.
at::Tensor wavy_inputs(int64_t first, int64_t last) {
  const auto t = torch::arange(first, last, at::kDouble);
  return torch::stack({(t * 1.3).sin() + t / 8, (t * 0.9).cos()}, 1);
}
at::Tensor wavy_targets(int64_t first, int64_t last) {
  const auto t = torch::arange(first, last, at::kDouble);
  return ((t * 0.37).sin() * (1 + t / 4)).unsqueeze(1);
}

// `run` is the rest of the closure after zero_grad().
template <typename LossWithBackward>
void fit(torch::nn::Sequential& net, int steps, Fit& seen, const LossWithBackward& run) {
  torch::optim::LBFGS optimizer(
      net->parameters(), torch::optim::LBFGSOptions().max_iter(6).line_search_fn("strong_wolfe"));
  for (int step = 0; step < steps; ++step) {
    optimizer.step([&] {
      ++seen.closures;
      optimizer.zero_grad();
      return run();
    });
  }
  seen.parameters = copies_of(net->parameters());
}

enum class Loss { Own, Averaged };

void fit_share(const Rank& self, int steps, Loss decides, Fit& seen) {
  const int64_t share = 16 / self.size, first = share * self.rank;
  const auto x = wavy_inputs(first, first + share), y = wavy_targets(first, first + share);
  auto net = wavy_net();
  DistributedDataParallel model(net, in(self));
  fit(net, steps, seen, [&]() -> at::Tensor {
    const auto loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    if (decides == Loss::Own) return loss;
    return all_reduce(loss.detach() / self.size, c10d::ReduceOp::SUM, self.group);
  });
}

}  // namespace

TEST_CASE("LBFGS with the averaged loss equals one process", "[ranks][ddp]") {
  constexpr int kSteps = 4;
  Fit alone;
  auto net = wavy_net();
  fit(net, kSteps, alone, [&] {
    const auto loss = torch::mse_loss(net->forward(wavy_inputs(0, 16)), wavy_targets(0, 16));
    loss.backward();
    return loss;
  });
  const int size = GENERATE(1, 2, 4);
  CAPTURE(size);
  const auto fits = run_ranks<Fit>(size, [](const Rank& self) {
    Fit seen;
    fit_share(self, kSteps, Loss::Averaged, seen);
    return seen;
  });
  for (const auto& of_rank : fits) {
    CHECK(of_rank.closures == alone.closures);
    CHECK(all_equal(of_rank.parameters, fits[0].parameters));
    // The order of sums differs: 1e-13 after 28 passes.
    CHECK(all_close(of_rank.parameters, alone.parameters, 0, 1e-10));
  }
}

// The reason why docs/wrapper.md says to average the loss: the ranks stop at different closures.
TEST_CASE("LBFGS with each rank's own loss does not equal one process", "[ranks][errors][ddp]") {
  std::vector<Fit> seen(2);
  const auto errors =
      errors_of_ranks(2, [&](const Rank& self) { fit_share(self, 1, Loss::Own, seen[self.rank]); });
  CHECK(seen[0].closures < seen[1].closures);
  CHECK(errors[0] == "");
  CHECK_THAT(errors[1], ContainsText("rank 0 of 2 has ended"));
}

}  // namespace ddp
