// The library writes tensors that a graph saved before its backward pass runs: autograd throws, and
// if no value changes it does not.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::live_graph {  // a unity build joins the tests' files
namespace {

using namespace testing;

constexpr const char* kModifiedInPlace = "modified by an inplace operation";

/// y = x w scale; a forward pass may change the scale first.
struct ScaledImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    if (added != 0) {
      const torch::NoGradGuard no_grad;
      scale.add_(added);
      added = 0;
    }
    return x * w * scale;
  }

  at::Tensor w = register_parameter("w", torch::full({1}, 2.0F));
  at::Tensor scale = register_buffer("scale", torch::full({1}, 3.0F));
  float added = 0;  // to the scale, by the next forward pass
};
TORCH_MODULE(Scaled);

using Model = DistributedDataParallel<Scaled>;

at::Tensor ones() { return torch::ones({1}); }

/// Passes of a model whose next forward pass changes the scale, to 4 on rank 0 and 5 on rank 1.
using Passes = std::function<void(Model&, Scaled&)>;

const std::map<std::string, Passes>& passes() {
  static const std::map<std::string, Passes> all{
      {"two backward passes",
       [](Model& model, Scaled&) {
         const auto y = model->forward(ones());
         y.backward({}, /*retain_graph=*/true);
         y.backward();
       }},
      {"two forward and two backward passes",
       [](Model& model, Scaled&) {
         const auto first = model->forward(ones());
         const auto second = model->forward(ones());
         first.backward();
         second.backward();
       }},
      {"a sync_buffers() between",
       [](Model& model, Scaled&) {
         const auto y = model->forward(ones());
         model->sync_buffers();
         y.backward();
       }},
      {"a refresh() between",
       [](Model& model, Scaled& net) {
         (void)model->forward(ones());
         const auto y = net->forward(ones());
         model->refresh();
         y.backward();
       }},
  };
  return all;
}

}  // namespace

TEST_CASE(
    "backward throws when rank 0's value was written into a saved buffer", "[ranks][ddp][errors]") {
  for (const auto& [name, run] : passes()) {
    CAPTURE(name);
    const auto errors = errors_of_ranks(2, [&, run = run](const Rank& self) {
      Scaled net;
      Model model(net, in(self));
      net->added = static_cast<float>(self.rank + 1);
      run(model, net);
    });
    CHECK_THAT(errors[1], ContainsText(kModifiedInPlace));
    // Rank 0's buffers do not change. It throws rank 1's error if rank 1 cannot average.
    if (!errors[0].empty()) CHECK_THAT(errors[0], ContainsText(kModifiedInPlace));
  }
}

TEST_CASE("backward throws when rank 0 alone changed a saved buffer", "[ranks][ddp][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    Scaled net;
    Model model(net, in(self));
    if (self.rank == 0) net->added = 1;
    const auto y = model->forward(ones());
    y.backward({}, /*retain_graph=*/true);
    y.backward();
  });
  CHECK_THAT(errors[1], ContainsText(kModifiedInPlace));
}

TEST_CASE("backward works when saved buffers are the same on all ranks", "[ranks][ddp]") {
  for (const auto& [name, run] : passes()) {
    if (name == "a refresh() between") continue;  // it writes every tensor
    CAPTURE(name);
    const auto gradients = run_ranks<float>(2, [&, run = run](const Rank& self) {
      Scaled net;
      Model model(net, in(self));
      net->added = 1;
      run(model, net);
      return net->w.grad().item<float>();
    });
    const bool twice = name.find("between") == std::string::npos;
    for (const auto gradient : gradients) CHECK(gradient == (twice ? 8 : 4));
  }
}

TEST_CASE("backward works when running statistics were written", "[ranks][ddp]") {
  const auto batch = [](int rank) { return torch::arange(6.0F).view({3, 2}) * (rank + 1) - rank; };
  const bool is_kept = GENERATE(true, false);
  const auto sums = run_ranks<at::Tensor>(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(2), torch::nn::Linear(2, 1));
    DistributedDataParallel model(net, in(self));
    const auto first = model->forward(batch(self.rank)).square().sum();
    const auto second = is_kept ? first : model->forward(batch(self.rank)).square().sum();
    first.backward({}, /*retain_graph=*/is_kept);
    const auto once = net->parameters()[0].grad().clone();
    second.backward();
    const auto& norm = net[0]->as<torch::nn::BatchNorm1d>();
    return torch::cat({net->parameters()[0].grad() - 2 * once, norm->running_mean});
  });
  CHECK(torch::allclose(sums[0].narrow(0, 0, 2), torch::zeros({2}), 0, 1e-4));
  CHECK(torch::equal(sums[0], sums[1]));
}

TEST_CASE("backward throws when statistics that it reads were written", "[ranks][ddp][errors]") {
  // In evaluation mode a batch normalization's backward reads them.
  const bool is_training_again = GENERATE(false, true);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::BatchNorm1d(2), torch::nn::Linear(2, 1));
    DistributedDataParallel model(net, in(self));
    const auto x = torch::arange(6.0F).view({3, 2}) * (self.rank + 1);
    const auto first = model->forward(x).square().sum();
    model->eval();
    const auto second = model->forward(x).square().sum();
    if (is_training_again) model->train();
    first.backward();
    second.backward();
  });
  CHECK_THAT(errors[1], ContainsText(kModifiedInPlace));
}

namespace {

/// A normalization of the program's own, whose backward reads a buffer with a batch
/// normalization's name.
struct OwnNormImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const torch::NoGradGuard no_grad;
    running_var.copy_(x.detach().square().mean().expand_as(running_var));
    const torch::AutoGradMode grad(true);
    return x * w / running_var;
  }

  at::Tensor w = register_parameter("w", torch::full({1}, 2.0F));
  at::Tensor running_mean = register_buffer("running_mean", torch::zeros({1}));
  at::Tensor running_var = register_buffer("running_var", torch::ones({1}));
};
TORCH_MODULE(OwnNorm);

/// A buffer of any dtype, which no forward pass changes.
struct WithBufferImpl : torch::nn::Module {
  explicit WithBufferImpl(const at::Tensor& value) { buffer = register_buffer("buffer", value); }
  at::Tensor forward(const at::Tensor& x) {
    return buffer.scalar_type() == at::kFloat ? x * w * buffer : x * w;
  }

  at::Tensor w = register_parameter("w", torch::full({1}, 2.0F));
  at::Tensor buffer;
};
TORCH_MODULE(WithBuffer);

}  // namespace

TEST_CASE(
    "backward throws when a buffer named like a statistic was written", "[ranks][ddp][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    OwnNorm net;
    DistributedDataParallel model(net, in(self));
    const auto y = model->forward(torch::full({1}, self.rank + 1.0F));
    y.backward({}, /*retain_graph=*/true);
    y.backward();
  });
  CHECK_THAT(errors[1], ContainsText(kModifiedInPlace));
}

TEST_CASE("equal buffers of any dtype and value do not disturb a graph", "[ranks][ddp]") {
  for (const auto dtype :
       {at::kFloat, at::kComplexHalf, at::kFloat8_e5m2, at::kUInt16, at::kBits8}) {
    CAPTURE(dtype);
    const auto errors = errors_of_ranks(2, [&](const Rank& self) {
      const auto value = dtype == at::kFloat ? torch::full({1}, std::nanf(""))
                                             : torch::empty({1}, at::TensorOptions(dtype));
      WithBuffer net(value);
      DistributedDataParallel model(net, in(self));
      const auto y = model->forward(ones());
      y.backward({}, /*retain_graph=*/true);
      y.backward();
    });
    CHECK(errors == std::vector<std::string>{"", ""});
  }
}

TEST_CASE("backward throws when saved parameters were written", "[ranks][ddp][errors]") {
  using Write = std::function<void(Model&, Scaled&, const Rank&)>;
  const std::map<std::string, Write> writes{
      {"an averager",
       [](Model& model, Scaled&, const Rank& self) {
         PeriodicModelAverager(1, 0, self.group).average_parameters(model->parameters());
       }},
      {"refresh",
       [](Model& model, Scaled& net, const Rank& self) {
         if (self.rank == 1) net->w.set_data(net->w + 1);
         model->refresh();
       }},
      {"ZeRO",
       [](Model& model, Scaled&, const Rank&) {
         ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
         model->forward(ones()).backward();
         optimizer.step();
       }},
  };
  for (const auto& [name, write] : writes) {
    CAPTURE(name);
    const auto errors = errors_of_ranks(2, [&, write = write](const Rank& self) {
      Scaled net;
      Model model(net, in(self));
      const auto x = ones().set_requires_grad(true);
      const auto y = net->forward(x);
      write(model, net, self);
      torch::autograd::grad({y}, {x});
    });
    CHECK_THAT(errors[1], ContainsText(kModifiedInPlace));
  }
}

}  // namespace ddp::live_graph
