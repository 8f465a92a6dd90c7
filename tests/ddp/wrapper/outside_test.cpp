// Learnable tensors of no module: averaged with also_average(), warned of without.
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

using Policy = DistributedDataParallel<torch::nn::Linear>;

torch::nn::Linear make_policy() {
  torch::nn::Linear net(2, 2);
  net->to(at::kDouble);
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.fill_(0.5);
  return net;
}

at::Tensor learnable(double value) {
  return torch::full({2}, value, at::dtype(at::kDouble).requires_grad(true));
}

// The gradient of `log_std` is (rank + 1) * exp(log_std).
at::Tensor loss_with(Policy& model, const at::Tensor& log_std, int rank) {
  const auto mean = model->forward(torch::ones({1, 2}, at::kDouble) * (1 + rank)).sum();
  return mean + (log_std.exp() * (rank + 1)).sum();
}

bool is_near(const at::Tensor& tensor, double value) {
  return tensor.defined() && torch::allclose(tensor, torch::full_like(tensor, value), 0, 1e-12);
}

}  // namespace

TEST_CASE("tensors of also_average are averaged, from rank 0's values", "[ranks][ddp][many]") {
  const std::string mode = GENERATE("plain", "views", "static_graph", "find_unused", "sum", "late");
  CAPTURE(mode);
  const auto results = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    Policy model(
        make_policy(), in(self)
                           .bucket_cap_mb(1e-5)
                           .gradient_as_bucket_view(mode == "views")
                           .static_graph(mode == "static_graph")
                           .find_unused_parameters(mode == "find_unused")
                           .reduction(mode == "sum" ? Reduction::Sum : Reduction::Mean));
    if (mode == "late") model->forward(torch::ones({1, 2}, at::kDouble)).sum().backward();
    auto log_std = learnable(self.rank);  // 0, everywhere
    model->also_average({log_std});
    std::vector<int> right{is_near(log_std, 0)};
    auto parameters = model->parameters();
    parameters.push_back(log_std);
    torch::optim::SGD optimizer(parameters, 0.5);
    const double mean = mode == "sum" ? 3 : 1.5;
    double value = 0;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      right.push_back(!log_std.grad().defined());
      loss_with(model, log_std, self.rank).backward();
      right.push_back(is_near(log_std.grad(), mean * std::exp(value)));
      optimizer.step();
      value -= 0.5 * mean * std::exp(value);
      right.push_back(is_near(log_std, value));
    }
    model->check_replicas({&optimizer});
    return right;
  });
  for (const auto& right : results) {
    for (const int is_right : right) CHECK(is_right == 1);
  }
}

TEST_CASE("tensors of also_average are averaged where all else is frozen", "[ranks][ddp][many]") {
  const auto passes = GENERATE(as<std::string>(), "one", "two forwards", "a graph twice");
  CAPTURE(passes);
  const auto results = run_ranks<int>(2, [&](const Rank& self) {
    auto log_std = learnable(0);
    Policy model(make_policy(), in(self));
    model->also_average({log_std});
    for (auto& p : model->parameters()) p.set_requires_grad(false);
    model->refresh();
    const auto first = loss_with(model, log_std, self.rank);
    const bool is_again = passes == "a graph twice";
    const auto second = passes == "two forwards" ? loss_with(model, log_std, self.rank) : first;
    first.backward({}, /*retain_graph=*/is_again);
    if (passes != "one") second.backward();
    return is_near(log_std.grad(), passes == "one" ? 1.5 : 3) ? 1 : 0;
  });
  for (const int is_right : results) CHECK(is_right == 1);
}

TEST_CASE(
    "a tensor of also_average that a loss leaves out is a missing gradient",
    "[ranks][ddp][errors]") {
  const auto results = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    auto log_std = learnable(0);
    Policy strict(make_policy(), in(self));
    strict->also_average({log_std});
    const auto input = torch::ones({1, 2}, at::kDouble);
    const auto error = error_of([&] { strict->forward(input).sum().backward(); });
    auto other = learnable(0);
    Policy model(make_policy(), in(self).find_unused_parameters(true));
    model->also_average({other});
    model->forward(input).sum().backward();
    const bool left_alone = !other.grad().defined();
    loss_with(model, other, self.rank).backward();
    const bool averaged = is_near(other.grad(), 1.5);
    // With the module frozen, the backward pass of one rank alone is not averaged.
    for (auto& p : model->parameters()) p.set_requires_grad(false);
    auto x = input.clone().set_requires_grad(true);
    if (self.rank == 0) model->forward(x).sum().backward();
    return std::vector<std::string>{error, left_alone ? "alone" : "", averaged ? "averaged" : ""};
  });
  for (const auto& of_rank : results) {
    CHECK_THAT(
        of_rank[0],
        ContainsText("backward ended without gradients for 1 of 3 parameters (also_average[0]") &&
            ContainsText("Add the losses and run one backward pass"));
    CHECK(of_rank[1] == "alone");
    CHECK(of_rank[2] == "averaged");
  }
}

TEST_CASE("also_average throws on all ranks for what it cannot average", "[ranks][ddp][errors]") {
  const std::string fault = GENERATE("undefined", "no leaf", "frozen", "parameter", "twice");
  CAPTURE(fault);
  const auto errors = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    Policy model(make_policy(), in(self));
    auto tensor = learnable(0);
    std::vector<at::Tensor> given{tensor};
    if (self.rank == 1) {
      if (fault == "undefined") given = {at::Tensor()};
      if (fault == "no leaf") given = {tensor.exp()};
      if (fault == "frozen") given = {tensor.detach()};
      if (fault == "parameter") given = {model->module()->weight};
      if (fault == "twice") given = {tensor, tensor};
    }
    const auto error = error_of([&] { model->also_average(given); });
    // The model can be trained without it.
    model->forward(torch::ones({1, 2}, at::kDouble)).sum().backward();
    model->check_replicas();
    return std::vector<std::string>{error};
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(errors[0][0], ContainsText("on rank 1 of 2: also_average: expected "));
}

TEST_CASE("check_replicas compares tensors of no module that an optimizer steps", "[ranks][ddp]") {
  const auto errors = run_ranks<std::vector<std::string>>(2, [](const Rank& self) {
    Policy model(make_policy(), in(self));
    auto log_std = learnable(0);
    auto parameters = model->parameters();
    parameters.push_back(log_std);
    torch::optim::SGD optimizer(parameters, 0.5);
    model->check_replicas({&optimizer});
    loss_with(model, log_std, self.rank).backward();
    optimizer.step();
    model->check_replicas();
    return std::vector<std::string>{error_of([&] { model->check_replicas({&optimizer}); })};
  });
  CHECK(errors[0] == errors[1]);
  CHECK_THAT(
      errors[0][0], ContainsText("but parameter \"of no module: 2 of parameter group 0\" differs "
                                 "on rank 1 from rank 0's by up to 0.5 in 2 of 2 elements") &&
                        ContainsText("model->also_average({tensor})"));
}

TEST_CASE("a step on a tensor of no module warns once", "[ranks][ddp]") {
  const std::string mode =
      GENERATE("stray", "averaged", "not stepped", "inputs", "ignored", "moving average");
  CAPTURE(mode);
  const auto counts = run_ranks<std::vector<int>>(2, [&](const Rank& self) {
    auto options = in(self);
    if (mode == "ignored") options.parameters_to_ignore({"bias"});
    Policy model(make_policy(), options);
    auto log_std = learnable(0);
    if (mode == "averaged") model->also_average({log_std});
    auto parameters = model->parameters();
    if (mode == "stray" || mode == "averaged") parameters.push_back(log_std);
    torch::optim::SGD optimizer(parameters, 0.5);
    const Warnings warnings;
    std::vector<int> counts;
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      if (mode == "inputs" || mode == "ignored") {
        auto x = torch::full({1, 2}, step + 1.0, at::kDouble).set_requires_grad(true);
        model->forward(x).sum().backward();
      } else {
        loss_with(model, log_std, self.rank).backward();
      }
      optimizer.step();
      if (mode == "moving average") {  // of a target that is used without NoGradGuard
        const torch::NoGradGuard no_grad;
        log_std.mul_(0.5).add_(model->module()->weight.sum(), 0.5);
      }
      counts.push_back(warnings.count("a step of a tensor of no wrapped module, [2] Double"));
    }
    return counts;
  });
  const bool tells = mode == "stray";
  for (const auto& of_rank : counts)
    CHECK(of_rank == std::vector<int>{0, tells, tells, tells, tells});
}

TEST_CASE("a sharded optimizer steps tensors of also_average", "[ranks][ddp][zero]") {
  const int stage = GENERATE(1, 2);
  CAPTURE(stage);
  const auto right = run_ranks<int>(2, [&](const Rank& self) {
    Policy model(make_policy(), in(self));
    auto log_std = learnable(0);
    model->also_average({log_std});
    auto parameters = model->parameters();
    parameters.push_back(log_std);
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
        model, {torch::optim::OptimizerParamGroup(parameters)}, torch::optim::SGDOptions(0.5),
        ZeroOptions().stage(stage));
    loss_with(model, log_std, self.rank).backward();
    optimizer.step();
    return static_cast<int>(is_near(log_std, -0.75));
  });
  CHECK(right == std::vector<int>{1, 1});
}

}  // namespace ddp
