// What checkpoint() returns may be views, tensors from elsewhere, or have no gradient.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/compare.h"
#include "support/error_of.h"

namespace {

using namespace ddp;
using ddp::testing::error_of;

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const at::Tensor&)>;

struct Applied : torch::nn::Module {
  explicit Applied(Function called) : function(std::move(called)) {}
  Tensors forward(const at::Tensor& x) { return function(x); }

  Function function;
};

enum class CallForm { Plain, OfFunction, OfModule, Nested };

Tensors called(CallForm form, const Function& function, const at::Tensor& x) {
  switch (form) {
    case CallForm::Plain:
      return function(x);
    case CallForm::OfFunction:
      return checkpoint(CheckpointOptions(), function, x);
    case CallForm::OfModule: {
      const auto module = std::make_shared<Applied>(function);
      return checkpoint(module, x);
    }
    case CallForm::Nested:
      return checkpoint(
          CheckpointOptions(),
          [function](const at::Tensor& t) { return checkpoint(CheckpointOptions(), function, t); },
          x);
  }
  return {};
}

struct Outcome {
  std::vector<bool> require_gradients;
  Tensors values, gradients;
};

/// The gradients of what is before the call.
Outcome outcome(CallForm form, const Function& function, bool argument_is_leaf) {
  const auto x = torch::linspace(-1, 1, 24, at::kDouble).view({2, 3, 4}).requires_grad_();
  const auto w = torch::full({4}, 1.5, at::kDouble).requires_grad_();
  auto results = called(form, function, argument_is_leaf ? x : x * w);
  Outcome outcome;
  auto loss = torch::zeros({}, at::kDouble);
  double scale = 1;
  for (const auto& result : results) {
    outcome.require_gradients.push_back(result.requires_grad());
    outcome.values.push_back(result.detach().clone());
    if (result.requires_grad()) loss = loss + (result.pow(3) * scale++).sum();
  }
  if (loss.requires_grad()) loss.backward();
  outcome.gradients = {x.grad(), w.grad()};
  return outcome;
}

}  // namespace

TEST_CASE("results that are views of an argument have its gradient", "[pure]") {
  const auto outside = torch::ones({4}, at::kDouble).requires_grad_() * 2;
  const auto constant = torch::ones({3, 2}, at::kDouble);
  const std::vector<std::pair<std::string, Function>> functions{
      {"flatten", [](const auto& x) -> Tensors { return {x.flatten(1)}; }},
      {"view", [](const auto& x) -> Tensors { return {x.view({-1})}; }},
      {"transpose", [](const auto& x) -> Tensors { return {x.transpose(0, 2)}; }},
      {"narrow", [](const auto& x) -> Tensors { return {x.narrow(2, 1, 2)}; }},
      {"a view of a view", [](const auto& x) -> Tensors { return {x.select(0, 1).t()}; }},
      {"chunk", [](const auto& x) -> Tensors { return x.chunk(2, 2); }},
      {"unbind", [](const auto& x) -> Tensors { return x.unbind(1); }},
      {"one chunk", [](const auto& x) -> Tensors { return {x.chunk(2, 2)[1]}; }},
      {"the argument", [](const auto& x) -> Tensors { return {x}; }},
      {"the argument twice",
       [](const auto& x) -> Tensors {
         return {x, x.exp(), x};
       }},
      {"a coupling layer",
       [](const auto& x) -> Tensors {
         const auto parts = x.chunk(2, 2);
         return {parts[0], parts[1] + parts[0].sin()};
       }},
      {"a view of what is computed",
       [](const auto& x) -> Tensors {
         const auto y = x.exp();
         return {y.view({-1}), y, y.transpose(0, 1)};
       }},
      {"a result twice",
       [](const auto& x) -> Tensors {
         const auto y = x.exp();
         return {y, y};
       }},
      {"contiguous",
       [](const auto& x) -> Tensors {
         return {x.contiguous(), x.to(at::kDouble)};
       }},
      {"detached",
       [](const auto& x) -> Tensors {
         return {x.detach(), x.exp().detach(), x.exp(), x.flatten().detach()};
       }},
      {"without gradients",
       [](const auto& x) -> Tensors {
         const torch::NoGradGuard no_grad;
         return {x * 2};
       }},
      {"from elsewhere",
       [&](const auto& x) -> Tensors {
         return {outside, constant, constant.t(), x + 1};
       }},
      {"by whether there are gradients",
       [](const auto& x) -> Tensors { return {torch::GradMode::is_enabled() ? x * 3 : x * 5}; }},
  };
  for (const auto& [name, function] : functions) {
    CAPTURE(name);
    for (const bool argument_is_leaf : {false, true}) {
      CAPTURE(argument_is_leaf);
      const auto expected = outcome(CallForm::Plain, function, argument_is_leaf);
      for (const auto form : {CallForm::OfFunction, CallForm::OfModule, CallForm::Nested}) {
        CAPTURE(static_cast<int>(form));
        const auto got = outcome(form, function, argument_is_leaf);
        CHECK(got.require_gradients == expected.require_gradients);
        CHECK(testing::all_equal(got.values, expected.values));
        CHECK(testing::all_equal(got.gradients, expected.gradients));
      }
    }
  }
}

TEST_CASE("views go through Checkpoint, a tuple, and checkpoint_sequential", "[pure]") {
  const auto x = torch::linspace(-1, 1, 12).view({2, 2, 3}).requires_grad_();
  const auto gradient = [&](const std::function<at::Tensor(const at::Tensor&)>& run) {
    x.mutable_grad().reset();
    run(x * 2).square().sum().backward();
    return x.grad().clone();
  };
  torch::nn::Sequential net(torch::nn::Flatten(), torch::nn::Linear(6, 2));
  Checkpoint flatten{torch::nn::Flatten()};
  const auto expected = gradient([&](const auto& h) { return net->forward(h); });
  CHECK(torch::equal(
      gradient([&](const auto& h) { return checkpoint_sequential(net, 2, h); }), expected));
  CHECK(torch::equal(
      gradient(
          [&](const auto& h) { return net->ptr(1)->as<torch::nn::Linear>()->forward(flatten(h)); }),
      expected));
  const auto coupled = [](const at::Tensor& h) {
    const auto parts = h.unbind(1);
    return std::make_tuple(parts[0], parts[1] + parts[0].tanh());
  };
  const auto joined = [](const std::tuple<at::Tensor, at::Tensor>& parts) {
    return torch::cat({std::get<0>(parts), std::get<1>(parts)}, 1);
  };
  CHECK(torch::equal(
      gradient([&](const auto& h) { return joined(checkpoint(CheckpointOptions(), coupled, h)); }),
      gradient([&](const auto& h) { return joined(coupled(h)); })));
}

TEST_CASE("a tensor that forward leaves in the module has its gradient", "[pure]") {
  struct Expert : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      balance = fc(x).square().mean();
      return fc(x).flatten();
    }
    torch::nn::Linear fc{register_module("fc", torch::nn::Linear(3, 3))};
    at::Tensor balance;
  };
  const auto expert = std::make_shared<Expert>();
  const auto gradient = [&](bool checkpoints) {
    expert->zero_grad();
    const auto x = torch::ones({2, 3});
    const auto output = checkpoints ? checkpoint(expert, x) : expert->forward(x);
    (output.exp().sum() + expert->balance).backward();
    return expert->fc->weight.grad().clone();
  };
  CHECK(torch::allclose(gradient(true), gradient(false), 1e-6));
}

TEST_CASE("a view that checkpoint returns does not keep what is inside", "[pure]") {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> inside;
  const auto function = [&](const at::Tensor& x) {
    const auto hidden = x.exp();
    inside.emplace(hidden.storage().getWeakStorageImpl());
    return (hidden * hidden).view({-1});
  };
  const auto x = torch::ones({2, 3}).requires_grad_();
  const auto plain = function(x);
  REQUIRE_FALSE(inside->expired());
  const auto y = checkpoint(CheckpointOptions(), function, x);
  CHECK(inside->expired());
  y.sum().backward();
  CHECK(inside->expired());
  CHECK(torch::allclose(x.grad(), 2 * (2 * x.detach()).exp()));
}

TEST_CASE("writing in place where a repetition could not is an error", "[pure][errors]") {
  const auto x = torch::ones({2, 3}).requires_grad_();
  const auto error = [&](const auto& function) { return error_of([&] { function(x * 2); }); };
  CHECK_THAT(
      error([](const at::Tensor& h) {
        checkpoint(
            CheckpointOptions(), [](at::Tensor t) { return t.relu_(); }, h);
      }),
      ContainsText("leaves its arguments as they are, got one that modifies tensor 0"));
  // x would not know of it.
  CHECK_THAT(
      error([](const at::Tensor& h) {
        checkpoint(
            CheckpointOptions(), [](const at::Tensor& t) { return t.view({6}); }, h)
            .mul_(2);
      }),
      ContainsText("is a view and is being modified inplace"));
  struct Clamped : torch::nn::Module {
    at::Tensor forward(const at::Tensor& h) {
      {
        const torch::NoGradGuard no_grad;
        weight.clamp_(-1, 1);
      }
      return h * weight;
    }
    at::Tensor weight = register_parameter("weight", torch::full({3}, 2.0));
  };
  const auto clamped = std::make_shared<Clamped>();
  CHECK_THAT(
      error([&](const at::Tensor& h) { checkpoint(clamped, h); }),
      ContainsText("got one that itself writes parameter weight"));
}
