// checkpoint() leaves buffers, and gradients that depend on them, as without it.
#include <optional>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using ddp::testing::error_of;

enum class Way { InPlace, ByData, BySetData };

/// Multiplies by how often it was called, and by a mean of what it got.
struct CountingImpl : torch::nn::Module {
  explicit CountingImpl(Way way_to_write) : way(way_to_write) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto mean = 0.5 * average + 0.5 * x.detach().mean(0);
    if (way == Way::InPlace) {
      const torch::NoGradGuard no_grad;
      calls.add_(1);
      average.copy_(mean);
    } else if (way == Way::ByData) {
      calls.data().add_(1);
      average.data().copy_(mean);
    } else {
      calls.set_data(calls.data() + 1);
      average.set_data(mean);
    }
    // Clones, because a second call writes what autograd saved in the first.
    return fc(x * calls) * average.clone() + mask;
  }

  const Way way;
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(3, 3))};
  at::Tensor calls = register_buffer("calls", torch::zeros({}));
  at::Tensor average = register_buffer("average", torch::ones({3}));
  at::Tensor mask = register_buffer("mask", torch::ones({3}));
};
TORCH_MODULE(Counting);

enum class Form { Plain, OfModule, OfFunction, Holder };

/// Gradients, buffers and outputs of `steps` steps of two forward passes each.
template <typename Module>
std::vector<at::Tensor> trained(Module net, Form form, int steps) {
  Checkpoint holder(net);
  const auto call = [&](const at::Tensor& x) {
    switch (form) {
      case Form::Plain:
        return net->forward(x);
      case Form::OfModule:
        return checkpoint(net, x);
      case Form::OfFunction:
        return checkpoint(
            CheckpointOptions().modules({net.ptr()}),
            [net](const at::Tensor& t) mutable { return net->forward(t); }, x);
      case Form::Holder:
        return holder(x);
    }
    return x;
  };
  std::vector<at::Tensor> results;
  const auto input = torch::linspace(-0.5, 0.5, 12).view({4, 3});
  for (int step = 0; step < steps; ++step) {
    // Of both calls, the first is repeated after the second has written.
    const auto first = call(input), second = call(input.sin());
    results.push_back(first.detach().clone());
    results.push_back(second.detach().clone());
    (first.square().sum() + second.exp().sum()).backward();
    for (const auto& parameter : net->parameters()) results.push_back(parameter.grad().clone());
    for (const auto& buffer : net->buffers()) results.push_back(buffer.clone());
  }
  return results;
}

}  // namespace

TEST_CASE("buffers that forward writes and uses are as without checkpoint", "[pure]") {
  const auto way = GENERATE(Way::InPlace, Way::ByData, Way::BySetData);
  CAPTURE(static_cast<int>(way));
  const auto made = [&] {
    torch::manual_seed(3);
    return Counting(way);
  };
  const auto expected = trained(made(), Form::Plain, 3);
  for (const auto form : {Form::OfModule, Form::OfFunction, Form::Holder}) {
    CAPTURE(static_cast<int>(form));
    CHECK(testing::all_equal(trained(made(), form, 3), expected));
  }
}

TEST_CASE("running statistics of a named module move once", "[pure]") {
  const auto made = [] {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(3).momentum(std::nullopt));
    norm->weight.data().copy_(torch::linspace(0.5, 2, 3));
    return norm;
  };
  const auto expected = trained(made(), Form::Plain, 3);
  for (const auto form : {Form::OfModule, Form::OfFunction, Form::Holder}) {
    CAPTURE(static_cast<int>(form));
    CHECK(testing::all_equal(trained(made(), form, 3), expected));
  }
  using torch::nn::InstanceNorm1d;
  const auto input = torch::linspace(-1, 1, 24).view({2, 3, 4});
  const auto statistics = [&](bool checkpoints) {
    InstanceNorm1d norm(torch::nn::InstanceNorm1dOptions(3).track_running_stats(true).affine(true));
    auto function = [norm](const at::Tensor& t) mutable { return norm->forward(t); };
    const auto options = CheckpointOptions().modules({norm.ptr()});
    (checkpoints ? checkpoint(options, function, input) : function(input)).exp().sum().backward();
    return std::vector<at::Tensor>{norm->running_mean, norm->running_var, norm->weight.grad()};
  };
  CHECK(testing::all_equal(statistics(true), statistics(false)));
}

TEST_CASE("a normalization that checkpoint is not told of is an error", "[pure][errors]") {
  const auto x = torch::ones({4, 3});
  const std::string text = "expected the running statistics of modules that are named, got others";
  const auto error = [&](auto norm, bool within_another = false) {
    auto function = [norm](const at::Tensor& t) mutable { return norm->forward(t); };
    const auto nested = [norm](const at::Tensor& t) mutable { return checkpoint(norm, t); };
    const auto options = CheckpointOptions().parameters({norm->weight, norm->bias});
    return error_of([&] {
      within_another ? checkpoint(options, nested, x) : checkpoint(options, function, x);
    });
  };
  torch::nn::BatchNorm1d norm(3);
  CHECK_THAT(error(norm), ContainsText(text));
  CHECK_THAT(error(norm, true), ContainsText(text));
  CHECK_THAT(error(SyncBatchNorm1d(3)), ContainsText(text));
  CHECK_THAT(error(SyncBatchNorm1d(3), true), ContainsText(text));
  norm->eval();
  CHECK(error(norm).empty());
  CHECK(error(norm, true).empty());
}

TEST_CASE("a buffer that another call changes before backward is an error", "[pure][errors]") {
  Counting net(Way::InPlace);
  const auto loss = checkpoint(net, torch::ones({2, 3})).sum();
  net->mask.add_(1);
  CHECK_THAT(
      error_of([&] { loss.backward(); }),
      ContainsText("expected buffer mask as it was in forward"));
  net->mask.sub_(1);
}

TEST_CASE("versions of buffers are those that an operation outside saved", "[pure]") {
  Counting net(Way::InPlace);
  const auto x = torch::ones({2, 3});
  const auto y = checkpoint(net, x);
  const auto saved = y * net->average;
  y.sum().backward({}, /*retain_graph=*/true);
  CHECK_NOTHROW(saved.sum().backward());
}

TEST_CASE("a synchronized normalization within a named function moves once", "[ranks]") {
  const auto run = [](bool checkpoints) {
    return ddp::testing::run_ranks<std::vector<at::Tensor>>(2, [&](const auto& self) {
      SyncBatchNorm1d norm(SyncBatchNormOptions(3).process_group(self.group));
      auto function = [norm](const at::Tensor& t) mutable { return norm->forward(t); };
      const auto options = CheckpointOptions().modules({norm.ptr()});
      const auto x = torch::linspace(0, 1 + self.rank, 12).view({4, 3}).requires_grad_();
      for (int pass = 0; pass < 2; ++pass) {
        const auto y = checkpoints ? checkpoint(options, function, x) : function(x);
        y.pow(3).sum().backward();
      }
      return std::vector<at::Tensor>{
          x.grad(), norm->weight.grad(), norm->running_mean, norm->running_var,
          norm->num_batches_tracked};
    });
  };
  const auto got = run(true), expected = run(false);
  for (size_t rank = 0; rank < 2; ++rank) CHECK(testing::all_equal(got[rank], expected[rank]));
}
