// Functions of the program's as forward passes.
#include <string>
#include <utility>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    register_module("body", body);
    register_module("policy", policy);
    register_module("value", value);
    to(at::kDouble);
    set_waves(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return policy(hidden(x)) + value(hidden(x)); }
  std::pair<at::Tensor, at::Tensor> act(const at::Tensor& x) {
    const auto features = hidden(x);
    return {policy(features), value(features)};
  }
  at::Tensor hidden(const at::Tensor& x) { return torch::tanh(body(x)); }

  torch::nn::Linear body{3, 4}, policy{4, 1}, value{4, 1};
};
TORCH_MODULE(TwoHeads);

using Model = DistributedDataParallel<TwoHeads>;

struct WithoutForwardImpl : torch::nn::Module {
  WithoutForwardImpl() { register_module("heads", heads); }
  at::Tensor act(const at::Tensor& x) { return heads->forward(x); }

  TwoHeads heads;
};
TORCH_MODULE(WithoutForward);

at::Tensor inputs_of(int rank, int step = 0) {
  return draw_values({5, 3}, static_cast<uint64_t>(10 * step + rank));
}

at::Tensor loss_of(TwoHeadsImpl& net, const at::Tensor& x) {
  return net.forward(x).square().mean();
}

std::vector<at::Tensor> gradients_of(torch::nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& p : module.parameters()) gradients.push_back(p.grad());
  return gradients;
}

/// The gradients of the mean of `loss` over the ranks, of one process.
template <typename Loss>
std::vector<at::Tensor> mean_gradients(int ranks, const Loss& loss) {
  TwoHeads net;
  at::Tensor sum = torch::zeros({}, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum = sum + loss(*net, rank);
  (sum / ranks).backward();
  return gradients_of(*net);
}

}  // namespace

TEST_CASE("run is the forward pass of any function", "[ranks][ddp][many]") {
  const auto way = GENERATE(
      as<std::string>(), "forward", "a helper", "another method", "void", "a reference", "no_sync");
  CAPTURE(way);
  constexpr int kRanks = 3;
  const auto results = run_ranks<std::vector<at::Tensor>>(kRanks, [&](const Rank& self) {
    Model model(TwoHeads(), in(self));
    auto& net = model->module();
    const auto x = inputs_of(self.rank);
    at::Tensor loss;
    if (way == "forward") loss = model->forward(x).square().mean();
    if (way == "a helper") loss = model->run([&] { return loss_of(*net, x); });
    if (way == "another method") {
      const auto [action, value] = model->run([&] { return net->act(x); });
      loss = (action + value).square().mean();
    }
    if (way == "void") model->run([&] { loss = loss_of(*net, x); });
    if (way == "a reference") {
      const auto& same = model->run([&]() -> at::Tensor& { return loss = loss_of(*net, x); });
      if (&same != &loss) return std::vector<at::Tensor>{};
    }
    if (way == "no_sync") {
      const auto half = x.split({2, 3});
      {
        const auto guard = model->no_sync();
        (model->run([&] { return net->forward(half[0]).square().sum(); }) / 5).backward();
      }
      loss = model->run([&] { return net->forward(half[1]).square().sum(); }) / 5;
    }
    loss.backward();
    return gradients_of(*net);
  });
  const auto expected = mean_gradients(
      kRanks, [](TwoHeadsImpl& net, int rank) { return loss_of(net, inputs_of(rank)); });
  for (const auto& gradients : results) {
    CHECK(largest_difference(gradients, expected) < 1e-14);
    CHECK(all_equal(gradients, results[0]));
  }
}

TEST_CASE("a module without forward is trained by run", "[ranks][ddp]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    DistributedDataParallel model(WithoutForward(), in(self));
    const auto x = inputs_of(self.rank);
    model->run([&] { return model->module()->act(x); }).square().mean().backward();
    return gradients_of(*model->module());
  });
  const auto expected =
      mean_gradients(2, [](TwoHeadsImpl& net, int rank) { return loss_of(net, inputs_of(rank)); });
  for (const auto& gradients : results) CHECK(largest_difference(gradients, expected) < 1e-14);
}

// As of an actor and a critic that share their features.
TEST_CASE("several functions of a model in one step are several passes", "[ranks][ddp][many]") {
  const bool adds_losses = GENERATE(true, false);
  CAPTURE(adds_losses);
  constexpr int kRanks = 2;
  const auto actor = [](TwoHeadsImpl& net, int rank) {
    return net.policy(net.hidden(inputs_of(rank, 1))).square().mean();
  };
  const auto critic = [](TwoHeadsImpl& net, int rank) {
    return net.value(net.hidden(inputs_of(rank, 2))).exp().mean();
  };
  const auto results = run_ranks<std::vector<at::Tensor>>(kRanks, [&](const Rank& self) {
    Model model(TwoHeads(), in(self).find_unused_parameters(true));
    auto& net = *model->module();
    if (adds_losses) {
      const auto first = model->run([&] { return actor(net, self.rank); });
      const auto second = model->run([&] { return critic(net, self.rank); });
      (first + second).backward();
    } else {
      model->run([&] { return actor(net, self.rank); }).backward();
      model->run([&] { return critic(net, self.rank); }).backward();
    }
    return gradients_of(net);
  });
  const auto expected = mean_gradients(
      kRanks, [&](TwoHeadsImpl& net, int rank) { return actor(net, rank) + critic(net, rank); });
  for (const auto& gradients : results) CHECK(largest_difference(gradients, expected) < 1e-14);
}

TEST_CASE("run counts the samples that count_samples says", "[ranks][ddp]") {
  const auto rows = [](int rank) { return draw_values({rank + 1, 3}, 7 + rank); };
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [&](const Rank& self) {
    Model model(TwoHeads(), in(self).reduction(Reduction::SampleWeighted));
    model->count_samples(self.rank + 1);
    model->run([&] { return loss_of(*model->module(), rows(self.rank)); }).backward();
    return gradients_of(*model);
  });
  TwoHeads net;
  loss_of(*net, at::cat({rows(0), rows(1)})).backward();
  for (const auto& gradients : results) {
    CHECK(largest_difference(gradients, gradients_of(*net)) < 1e-14);
  }
}

TEST_CASE("a function that throws on one rank is an error of all", "[ranks][ddp][errors]") {
  const auto errors = errors_of_ranks(2, kLongTimeout, [](const Rank& self) {
    Model model(TwoHeads(), in(self));
    auto loss = model->run([&] {
      if (self.rank == 1) throw std::runtime_error("no sample is left");
      return loss_of(*model->module(), inputs_of(self.rank));
    });
    loss.backward();
  });
  CHECK(errors[1] == "no sample is left");
  CHECK_THAT(
      errors[0], ContainsText("forward threw on rank 1") && ContainsText("no sample is left"));
}

}  // namespace ddp
