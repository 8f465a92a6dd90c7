// The optimizer steps bucket by bucket: the same as stepping behind backward, to the bit.
#include <ATen/CPUGeneratorImpl.h>
#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::errors_of_ranks;
using testing::in;
using testing::Rank;
using testing::run_ranks;

using OptimizerPtr = std::shared_ptr<torch::optim::Optimizer>;

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(
      torch::nn::Linear(8, 16), torch::nn::ReLU(), torch::nn::Linear(16, 16), torch::nn::ReLU(),
      torch::nn::Linear(16, 4));
  auto chance = at::make_generator<at::CPUGeneratorImpl>(1);
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.normal_(0, 0.3, chance);
  return net;
}

/// The net's parameters in two groups, and one tensor that no model has.
OptimizerPtr make_optimizer(
    const std::string& kind, torch::nn::Sequential& net, const at::Tensor& beside) {
  const auto all = net->parameters();
  const std::vector<at::Tensor> first{all[3], all[0], beside};
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

/// The parameters and `beside` after a few steps.
std::vector<at::Tensor> train(
    const Rank& self, const std::string& kind, When when, DistributedDataParallelOptions options) {
  auto net = make_net();
  const auto beside = torch::ones({3}).set_requires_grad(true);
  const auto optimizer = make_optimizer(kind, net, beside);
  DistributedDataParallel model(net, options.process_group(self.group));
  if (when == When::InBackward) model->step_in_backward(optimizer);
  auto chance = at::make_generator<at::CPUGeneratorImpl>(100 + self.rank);  // a rank is a thread
  for (int step = 0; step < 6; ++step) {
    optimizer->zero_grad();
    const auto x = torch::randn({5, 8}, chance);
    if (step == 3) {  // accumulates; nothing is stepped
      const auto guard = model->no_sync();
      model->forward(x).sum().backward();
    }
    beside.mutable_grad() = torch::full({3}, 0.5);
    model->forward(x).square().sum().backward();
    if (when == When::After) optimizer->step();
  }
  auto result = net->parameters();
  result.push_back(beside);
  for (const auto& group : optimizer->param_groups()) TORCH_CHECK(group.params().size() >= 3);
  return result;
}

}  // namespace

TEST_CASE("stepping in backward is stepping behind it", "[ranks][step]") {
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
    for (size_t i = 0; i < results[0][0].size(); ++i) {
      CHECK(torch::equal(results[0][1][i], results[0][0][i]));
      CHECK(torch::equal(results[0][1][i], results[1][1][i]));
    }
  }
}

TEST_CASE("an optimizer that cannot step in parts is refused", "[ranks][step][errors]") {
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
      ContainsText("expected one function to call with reduced gradients"));
}

}  // namespace ddp
