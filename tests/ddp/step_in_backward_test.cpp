// The optimizer steps bucket by bucket: to the bit the same as stepping after backward.
#include <ATen/CPUGeneratorImpl.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(
      torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 16), torch::nn::ReLU(),
      torch::nn::Linear(16, 4));
  draw_normal(*net, 0.3);
  return net;
}

/// The net's parameters in two groups, and one tensor of no model.
OptimizerPtr make_optimizer(
    const std::string& kind, torch::nn::Sequential& net, const at::Tensor& outside) {
  const auto all = net->parameters();
  const std::vector<at::Tensor> first{all[3], all[0], outside};
  const std::vector<at::Tensor> second{all[1], all[2], all[4], all[5]};
  std::vector<torch::optim::OptimizerParamGroup> groups{
      torch::optim::OptimizerParamGroup(first), torch::optim::OptimizerParamGroup(second)};
  using namespace torch::optim;
  if (kind == "sgd") {
    return std::make_shared<SGD>(groups, SGDOptions(0.1).momentum(0.9).nesterov(true));
  }
  if (kind == "adam") return std::make_shared<Adam>(groups, AdamOptions(0.01).amsgrad(true));
  if (kind == "adamw") return std::make_shared<AdamW>(groups, AdamWOptions(0.01));
  if (kind == "rmsprop") {
    return std::make_shared<RMSprop>(groups, RMSpropOptions(0.01).centered(true));
  }
  return std::make_shared<Adagrad>(groups, AdagradOptions(0.01));
}

enum class When { After, InBackward };

/// The parameters and `outside` after a few steps.
std::vector<at::Tensor> train(
    const Rank& self, const std::string& kind, When when, DistributedDataParallelOptions options) {
  auto net = make_net();
  const auto outside = torch::ones({3}).set_requires_grad(true);
  const auto optimizer = make_optimizer(kind, net, outside);
  DistributedDataParallel model(net, options.process_group(self.group));
  if (when == When::InBackward) model->step_in_backward(optimizer);
  // Not torch's generator, which all ranks share, since they are threads.
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + self.rank);
  for (int step = 0; step < 10; ++step) {  // more than tuning takes
    optimizer->zero_grad();
    const auto x = torch::randn({5, 8}, generator);
    if (step == 3) {  // a pass that accumulates, without a step
      const auto guard = model->no_sync();
      model->forward(x).sum().backward();
    }
    outside.mutable_grad() = torch::full({3}, 0.5);
    model->forward(x).square().sum().backward();
    if (when == When::After) optimizer->step();
  }
  auto result = net->parameters();
  result.push_back(outside);
  for (const auto& group : optimizer->param_groups()) TORCH_CHECK(group.params().size() >= 3);
  return result;
}

}  // namespace

TEST_CASE("stepping in backward equals stepping after it", "[ranks][step]") {
  const std::string kind = GENERATE("sgd", "adam", "adamw", "rmsprop", "adagrad");
  const bool find_unused = GENERATE(false, true);
  CAPTURE(kind, find_unused);
  const auto options =
      DistributedDataParallelOptions().bucket_cap_mb(0.0003).find_unused_parameters(find_unused);
  for (const bool as_views : {false, true}) {
    auto with_views = options;
    with_views.gradient_as_bucket_view(as_views);
    const auto results = run_ranks<std::vector<std::vector<at::Tensor>>>(2, [&](const Rank& self) {
      return std::vector<std::vector<at::Tensor>>{
          train(self, kind, When::After, with_views),
          train(self, kind, When::InBackward, with_views)};
    });
    CHECK(all_equal(results[0][1], results[0][0]));
    CHECK(all_equal(results[0][1], results[1][1]));
  }
}

TEST_CASE(
    "stepping in backward equals stepping after it when buckets are stepped at the end",
    "[ranks][step]") {
  const bool tuned = GENERATE(false, true);
  const bool is_static = !tuned || GENERATE(false, true);
  CAPTURE(tuned, is_static);
  auto options = DistributedDataParallelOptions().static_graph(is_static);
  if (tuned) options.bucket_cap_mb(kTuneBucketCap);
  const auto results = run_ranks<std::vector<std::vector<at::Tensor>>>(2, [&](const Rank& self) {
    return std::vector<std::vector<at::Tensor>>{
        train(self, "adam", When::After, options), train(self, "adam", When::InBackward, options)};
  });
  CHECK(all_equal(results[0][1], results[0][0]));
  CHECK(all_equal(results[0][1], results[1][1]));
}

TEST_CASE("all ranks step the same parameters when a pass throws", "[ranks][step][errors]") {
  struct Outcome {
    std::string error;
    std::vector<at::Tensor> parameters;
  };
  const auto outcomes = run_ranks<Outcome>(2, [](const Rank& self) {
    auto net = make_net();
    DistributedDataParallel model(net, in(self).bucket_cap_mb(0.0003));
    model->step_in_backward(std::make_shared<torch::optim::SGD>(net->parameters(), 0.1));
    Outcome outcome;
    for (int step = 0; step < 4; ++step) {
      model->zero_grad();
      const auto y = model->forward(torch::ones({5, 8}));
      // In the third step, rank 1's loss depends on the first layer alone.
      const bool astray = step == 2 && self.rank == 1;
      const auto error = error_of<c10::Error>([&] {
        (astray ? net->parameters()[0].sum() + 0 * y.detach().sum() : y.square().sum()).backward();
      });
      if (!error.empty()) outcome.error = error;
    }
    outcome.parameters = copies_of(net->parameters());
    return outcome;
  });
  CHECK_THAT(
      outcomes[0].error, ContainsText("without gradients for 5 of 6") && ContainsText("rank 1"));
  CHECK(outcomes[0].error == outcomes[1].error);
  CHECK(all_equal(outcomes[0].parameters, outcomes[1].parameters));
}

TEST_CASE("a single rank can train after a backward pass that threw", "[ranks][step]") {
  const auto weights = run_ranks<std::vector<float>>(1, [](const Rank& self) {
    auto net = make_linear();
    DistributedDataParallel model(net, in(self));
    model->step_in_backward(std::make_shared<torch::optim::SGD>(net->parameters(), 0.25));
    std::vector<float> seen;
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      const auto y = model->forward(torch::ones({1, 1}));
      if (step == 1)
        y.register_hook([](const at::Tensor&) { TORCH_CHECK(false, "out of memory"); });
      try {
        y.sum().backward();
      } catch (const c10::Error&) {
      }
      seen.push_back(net->weight.item<float>());
    }
    return seen;
  });
  CHECK(weights[0] == std::vector<float>{0.75, 0.75, 0.5, 0.25});
}

TEST_CASE("a leftover step() after backward is warned of", "[ranks][step]") {
  const std::string kind = GENERATE("sgd", "adam");
  const bool leftover = GENERATE(false, true);
  const WarnAlways always;
  const auto counts = run_ranks<int>(1, [&](const Rank& self) {
    auto net = make_net();
    DistributedDataParallel model(net, in(self).bucket_cap_mb(0.0003));
    std::shared_ptr<torch::optim::Optimizer> optimizer;
    if (kind == "sgd") optimizer = std::make_shared<torch::optim::SGD>(net->parameters(), 0.01);
    if (kind == "adam") optimizer = std::make_shared<torch::optim::Adam>(net->parameters());
    model->step_in_backward(optimizer);
    const Warnings warnings;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(torch::ones({5, 8})).square().sum().backward();
      if (leftover) optimizer->step();
      const torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.clamp_(-100, 100);  // changes nothing
    }
    return warnings.count("a second call steps twice");
  });
  CHECK(counts[0] == static_cast<int>(leftover));
}

TEST_CASE(
    "step_in_backward throws for an optimizer that cannot step in parts", "[ranks][step][errors]") {
  const auto refused = [](const std::function<OptimizerPtr(torch::nn::Sequential&)>& make) {
    return errors_of_ranks(1, [&](const Rank& self) {
      auto net = make_net();
      DistributedDataParallel model(net, in(self));
      model->step_in_backward(make(net));
    })[0];
  };
  CHECK_THAT(
      refused([](auto&) { return nullptr; }), ContainsText("expected an optimizer, got none"));
  CHECK_THAT(
      refused([](auto& net) { return std::make_shared<torch::optim::LBFGS>(net->parameters()); }),
      ContainsText("updates each parameter on its own, got LBFGS"));
  CHECK_THAT(
      refused(
          [](auto&) { return std::make_shared<torch::optim::SGD>(make_net()->parameters(), 0.1); }),
      ContainsText("got one that has none of them"));
  CHECK_THAT(
      errors_of_ranks(
          1,
          [](const Rank& self) {
            auto net = make_net();
            DistributedDataParallel model(net, in(self));
            const auto sgd = std::make_shared<torch::optim::SGD>(net->parameters(), 0.1);
            model->step_in_backward(sgd);
            model->step_in_backward(sgd);
          })[0],
      ContainsText("step_in_backward: expected to be called once"));
}

}  // namespace ddp
