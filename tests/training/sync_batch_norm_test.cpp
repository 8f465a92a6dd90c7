// Compares batch normalization over all ranks' batches with LibTorch's over the whole batch.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/compare.h"
#include "support/error_of.h"
#include "support/nets.h"
#include "support/ranks.h"

namespace {

using namespace ddp;
using namespace ddp::testing;

struct Case {
  std::vector<int64_t> shape;  // of the whole batch
  std::vector<int64_t> split;  // its rows by rank
  at::ScalarType type = at::kFloat;
  bool affine = true;
  std::optional<double> momentum = 0.1;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

at::Tensor whole_batch(const Case& c, int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  auto x = torch::randn(c.shape, generator, c.type) * 3 + 5;
  return x.contiguous(c.format);
}

at::Tensor weights_of(const at::Tensor& x) {  // for a loss that distinguishes every element
  return torch::linspace(-1, 1, x.numel(), x.scalar_type()).view(x.sizes());
}

/// Two steps: output, gradient of the input, sums of the parameters' gradients, buffers.
struct Trained {
  std::vector<at::Tensor> outputs, input_gradients, parameter_gradients, buffers;
};

template <typename Norm>
Trained train(
    Norm& norm, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& ws) {
  Trained trained;
  for (size_t step = 0; step < inputs.size(); ++step) {
    const auto x = inputs[step].detach().requires_grad_();
    const auto y = norm->forward(x);
    TORCH_CHECK(y.numel() == 0 || y.suggest_memory_format() == x.suggest_memory_format());
    (y * ws[step]).sum().backward();
    trained.outputs.push_back(y.detach());
    trained.input_gradients.push_back(x.grad());
  }
  for (const auto& p : norm->parameters()) trained.parameter_gradients.push_back(p.grad());
  for (const auto& b : norm->buffers()) trained.buffers.push_back(b);
  return trained;
}

constexpr int kSteps = 2;

void check_close(const at::Tensor& got, const at::Tensor& expected, double tolerance) {
  REQUIRE(got.sizes() == expected.sizes());
  if (got.numel() == 0) return;
  const auto difference = (got.to(at::kDouble) - expected.to(at::kDouble)).abs().max();
  CHECK(
      difference.item<double>() <=
      tolerance * std::max(1.0, expected.abs().max().item().toDouble()));
}

void check_like_whole_batch(const Case& c) {
  CAPTURE(c.shape, c.split, c.affine, at::toString(c.type));
  const int world = static_cast<int>(c.split.size());
  const auto options =
      torch::nn::BatchNormOptions(c.shape[1]).affine(c.affine).momentum(c.momentum);
  const auto begin = [&](torch::nn::Module& norm) {
    norm.to(c.type);
    const torch::NoGradGuard no_grad;
    for (auto& p : norm.parameters()) p.add_(torch::linspace(0.1, 0.5, p.numel(), c.type));
  };
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> ws;
  for (int step = 0; step < kSteps; ++step) {
    inputs.push_back(whole_batch(c, step));
    ws.push_back(weights_of(inputs.back()));
  }
  Trained expected;
  const auto of_dimension = [&](auto norm) {
    begin(*norm);
    expected = train(norm, inputs, ws);
  };
  if (c.shape.size() <= 3) of_dimension(torch::nn::BatchNorm1d(options));
  if (c.shape.size() == 4) of_dimension(torch::nn::BatchNorm2d(options));
  if (c.shape.size() == 5) of_dimension(torch::nn::BatchNorm3d(options));

  const auto results = run_ranks<Trained>(world, [&](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(c.shape[1])
                           .affine(c.affine)
                           .momentum(c.momentum)
                           .process_group(self.group));
    begin(*norm);
    std::vector<at::Tensor> mine;
    std::vector<at::Tensor> my_ws;
    for (int step = 0; step < kSteps; ++step) {
      mine.push_back(inputs[step].split_with_sizes(c.split)[self.rank].contiguous(c.format));
      my_ws.push_back(ws[step].split_with_sizes(c.split)[self.rank]);
    }
    return train(norm, mine, my_ws);
  });
  const double tolerance = c.type == at::kDouble ? 1e-12 : 1e-6;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> gradients;
    for (const auto& result : results) {
      outputs.push_back(result.outputs[step]);
      gradients.push_back(result.input_gradients[step]);
    }
    check_close(torch::cat(outputs), expected.outputs[step], tolerance);
    check_close(torch::cat(gradients), expected.input_gradients[step], tolerance);
  }
  for (size_t i = 0; i < expected.parameter_gradients.size(); ++i) {
    auto sum = results[0].parameter_gradients[i].clone();
    for (int r = 1; r < world; ++r) sum += results[r].parameter_gradients[i];
    check_close(sum, expected.parameter_gradients[i], tolerance);
  }
  for (const auto& result : results) {
    REQUIRE(result.buffers.size() == expected.buffers.size());
    for (size_t i = 0; i < expected.buffers.size(); ++i) {
      check_close(result.buffers[i], expected.buffers[i], tolerance);
    }
  }
}

}  // namespace

TEST_CASE("SyncBatchNorm is BatchNorm over the whole batch", "[ranks]") {
  check_like_whole_batch({{9, 3}, {4, 5}});
  check_like_whole_batch({{9, 3}, {4, 5}, at::kDouble});
  check_like_whole_batch({{6, 2, 7}, {1, 5}, at::kDouble, true, std::nullopt});
  check_like_whole_batch({{6, 4, 3, 5}, {2, 4}, at::kFloat, false});
  check_like_whole_batch(
      {{6, 4, 3, 5}, {2, 4}, at::kDouble, true, 0.3, at::MemoryFormat::ChannelsLast});
  check_like_whole_batch({{4, 2, 2, 3, 2}, {3, 1}, at::kDouble});
}

TEST_CASE("SyncBatchNorm takes an empty batch", "[ranks]") {
  check_like_whole_batch({{5, 3, 2, 2}, {5, 0}, at::kDouble});
  check_like_whole_batch({{5, 3}, {2, 0, 3}, at::kFloat, false});
}

TEST_CASE("the gradient of SyncBatchNorm is the slope of the loss", "[ranks]") {
  // The sum of all ranks' losses, by central differences on rank 1's input.
  const auto worst = run_ranks<double>(2, [](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(2).process_group(self.group));
    norm->to(torch::kDouble);
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(self.rank));
    const auto input = torch::randn({3, 2, 2}, generator, torch::kDouble);
    const auto loss_of = [&](const at::Tensor& x) {
      return norm->forward(x).pow(3).mul(weights_of(x)).sum();
    };
    const auto x = input.clone().requires_grad_();
    loss_of(x).backward();
    double difference = 0;
    constexpr double kStep = 1e-6;
    for (int64_t i = 0; i < input.numel(); ++i) {
      double losses[2];
      for (int side = 0; side < 2; ++side) {
        auto moved = input.clone();
        if (self.rank == 1) moved.view(-1)[i] += side == 0 ? -kStep : kStep;
        losses[side] = ddp::all_reduce(loss_of(moved).detach(), c10d::ReduceOp::SUM, self.group)
                           .item<double>();
      }
      const double slope = (losses[1] - losses[0]) / (2 * kStep);
      difference = std::max(difference, std::abs(slope - x.grad().view(-1)[i].item<double>()));
    }
    return self.rank == 1 ? difference : 0.0;
  });
  CHECK(worst[1] < 1e-6);
}

TEST_CASE("SyncBatchNorm has two collectives a step", "[ranks]") {
  const auto sent = run_ranks<uint64_t>(2, [](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(3).process_group(self.group));
    const auto x = torch::randn({4, 3}).requires_grad_();
    ddp::barrier(self.group);
    const auto before = self.group->getSequenceNumberForGroup();
    norm->forward(x).square().sum().backward();
    return self.group->getSequenceNumberForGroup() - before;
  });
  CHECK(sent[0] == 2);
}

TEST_CASE("SyncBatchNorm alone and in evaluation is BatchNorm", "[pure]") {
  torch::manual_seed(1);
  const auto x = torch::randn({4, 3, 5});
  torch::nn::BatchNorm1d plain(3);
  SyncBatchNorm1d alone(3);
  for (int step = 0; step < 2; ++step) CHECK(torch::equal(alone(x), plain(x)));
  CHECK(torch::equal(alone->running_var, plain->running_var));
  alone->eval();
  plain->eval();
  CHECK(torch::equal(alone(x), plain(x)));
  SyncBatchNorm untracked(SyncBatchNormOptions(3).track_running_stats(false));
  untracked->eval();
  CHECK(untracked->buffers().empty());
  CHECK(untracked(x).mean().abs().item<float>() < 1e-6);
  std::stringstream text;
  text << *untracked;
  CHECK(text.str().find("track_running_stats=false") != std::string::npos);
}

TEST_CASE("SyncBatchNorm refuses inputs that it cannot normalize", "[pure][errors]") {
  const auto refuses = [](const std::string& text, const auto& call) {
    CAPTURE(text);
    CHECK(error_of([&] { call(); }).find(text) != std::string::npos);
  };
  refuses("num_features >= 1, got 0", [] { SyncBatchNorm norm(0); });
  refuses("eps > 0", [] { SyncBatchNorm norm(SyncBatchNormOptions(1).eps(0)); });
  refuses("momentum <= 1, got 2", [] { SyncBatchNorm norm(SyncBatchNormOptions(1).momentum(2)); });
  refuses("2 to 5 dimensions, got [4]", [] { SyncBatchNorm(4)->forward(torch::ones({4})); });
  refuses("expected an input of 4 dimensions", [] {
    SyncBatchNorm2d(4)->forward(torch::ones({2, 4}));
  });
  refuses("expected 4 channels in the second dimension, got [2, 3]", [] {
    SyncBatchNorm1d(4)->forward(torch::ones({2, 3}));
  });
}

TEST_CASE("one value a channel in the whole batch fails every rank", "[ranks][errors]") {
  const auto errors = errors_of_ranks(3, [](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(2).process_group(self.group));
    norm->forward(torch::ones({self.rank == 1 ? 1 : 0, 2}));
  });
  for (const auto& error : errors) {
    CHECK(error.find("Expected more than 1 value per channel") != std::string::npos);
  }
}

TEST_CASE("SyncBatchNorm requires a join that ends early", "[ranks][errors]") {
  const bool ends_early = GENERATE(false, true);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    torch::nn::Sequential net(
        SyncBatchNorm(SyncBatchNormOptions(2).process_group(self.group)), torch::nn::Linear(2, 1));
    DistributedDataParallel model(net, DistributedDataParallelOptions().process_group(self.group));
    model->join(
        [&] {
          for (int step = 0; step < 2; ++step) {
            model->forward(torch::randn({2, 2})).sum().backward();
          }
        },
        JoinOptions().throw_on_early_termination(ends_early));
  });
  for (const auto& error : errors) {
    CAPTURE(error);
    CHECK(error.empty() == ends_early);
    if (!ends_early) CHECK(error.find("throw_on_early_termination(true)") != std::string::npos);
  }
}

TEST_CASE("SyncBatchNorm works under the wrapper, no_sync and checkpoint", "[ranks]") {
  const auto results = run_ranks<std::vector<at::Tensor>>(2, [](const Rank& self) {
    const auto gradients = [&](bool checkpoints) {
      torch::nn::Sequential net(
          torch::nn::Linear(3, 4), SyncBatchNorm(SyncBatchNormOptions(4).process_group(self.group)),
          torch::nn::Linear(4, 1));
      const torch::NoGradGuard no_grad;
      for (auto& p : net->parameters()) p.copy_(torch::linspace(-1, 1, p.numel()).view(p.sizes()));
      const torch::AutoGradMode with_grad(true);
      std::vector<at::Tensor> all;
      const auto x = torch::linspace(0, 1 + self.rank, 12).view({4, 3});
      const auto step = [&](auto& model) {
        (checkpoints ? checkpoint(model, x) : model->forward(x)).square().sum().backward();
      };
      if (checkpoints) {
        step(net);
        for (auto& p : net->parameters()) {
          all.push_back(ddp::all_reduce(p.grad().clone(), c10d::ReduceOp::SUM, self.group) / 2);
        }
      } else {
        DistributedDataParallel model(
            net, DistributedDataParallelOptions().process_group(self.group));
        step(model);
        for (auto& p : net->parameters()) all.push_back(p.grad().clone());
        const auto guard = model->no_sync();
        step(model);
      }
      all.push_back(net->buffers()[0].clone());
      return all;
    };
    auto all = gradients(false);
    const auto again = gradients(true);
    all.insert(all.end(), again.begin(), again.end());
    return all;
  });
  const auto& all = results[0];
  const size_t half = all.size() / 2;
  for (size_t i = 0; i + 1 < half; ++i) {
    CAPTURE(i);
    CHECK(torch::equal(results[0][i], results[1][i]));
    check_close(all[half + i], all[i], 1e-6);
  }
}

namespace {

// A Sequential accepts no Sequential, whose forward is a template.
struct InnerImpl : torch::nn::SequentialImpl {
  using SequentialImpl::SequentialImpl;
  at::Tensor forward(at::Tensor x) { return SequentialImpl::forward(std::move(x)); }
};
TORCH_MODULE(Inner);

}  // namespace

TEST_CASE("convert_sync_batchnorm keeps parameters, statistics and mode", "[pure]") {
  torch::nn::Sequential net(
      torch::nn::Conv2d(1, 2, 3), torch::nn::BatchNorm2d(2),
      Inner(torch::nn::Flatten(), torch::nn::BatchNorm1d(8)));
  net->forward(torch::randn({3, 1, 4, 4}));
  net->eval();
  const auto x = torch::randn({3, 1, 4, 4});
  const auto before = net->forward(x);
  const auto parameters = net->parameters();
  const auto names = net->named_parameters().keys();
  const auto buffer_names = net->named_buffers().keys();

  CHECK(convert_sync_batchnorm(net) == 2);
  CHECK(convert_sync_batchnorm(net) == 0);
  CHECK(net->named_parameters().keys() == names);
  CHECK(net->named_buffers().keys() == buffer_names);
  for (size_t i = 0; i < parameters.size(); ++i) CHECK(net->parameters()[i].is_same(parameters[i]));
  CHECK(torch::equal(net->forward(x), before));
  CHECK(net[1]->as<SyncBatchNorm2d>() != nullptr);
  net->train();
  net->forward(x);
  CHECK(net[1]->as<SyncBatchNorm2d>()->num_batches_tracked.item<int64_t>() == 2);
}

namespace {

struct OwnNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(2))};
};

}  // namespace

TEST_CASE("convert_sync_batchnorm names modules that it cannot convert", "[pure][errors]") {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(2), std::make_shared<OwnNet>());
  CHECK(
      error_of<c10::ValueError>([&] { convert_sync_batchnorm(net); }) ==
      "convert_sync_batchnorm: expected every BatchNorm to be an element of a Sequential, got "
      "1.norm, which the code around it holds by the type BatchNorm. Declare a ddp::SyncBatchNorm "
      "there.");
  CHECK(net[0]->as<torch::nn::BatchNorm1d>() != nullptr);
  torch::nn::BatchNorm1d norm(2);
  CHECK_THAT(
      error_of<c10::ValueError>([&] { convert_sync_batchnorm(norm); }),
      ContainsText("got the module itself"));
  torch::nn::ModuleList list(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  CHECK_THAT(
      error_of<c10::ValueError>([&] { convert_sync_batchnorm(list); }),
      ContainsText("got 1, which"));
}

namespace {

struct BlockOfSequential : torch::nn::Module {
  explicit BlockOfSequential(const torch::nn::Sequential& of) : net(register_module("net", of)) {}
  at::Tensor forward(const at::Tensor& x) { return net->forward(x); }
  torch::nn::Sequential net;
};

}  // namespace

TEST_CASE("convert_sync_batchnorm takes any module, and Sequentials at any depth", "[pure]") {
  using torch::nn::Linear;
  using torch::nn::Sequential;
  const auto inner =
      std::make_shared<BlockOfSequential>(Sequential(Linear(2, 3), torch::nn::BatchNorm1d(3)));
  const auto outer = std::make_shared<BlockOfSequential>(
      Sequential(torch::nn::BatchNorm1d(2), inner, torch::nn::BatchNorm1d(3)));
  const auto x = torch::randn({5, 2});
  outer->forward(x);
  outer->eval();
  const auto before = outer->forward(x);
  const auto names = outer->named_parameters().keys();
  CHECK(convert_sync_batchnorm(outer) == 3);
  CHECK(convert_sync_batchnorm(*outer) == 0);
  CHECK(outer->named_parameters().keys() == names);
  CHECK(torch::equal(outer->forward(x), before));
  CHECK(inner->net[1]->as<SyncBatchNorm1d>() != nullptr);
  outer->train();
  outer->forward(x);
  CHECK(inner->net[1]->as<SyncBatchNorm1d>()->num_batches_tracked.item<int64_t>() == 2);
}

namespace {

/// Rank 0 adds a layer before the normalization, which other ranks skip. Registered last, it is in
/// the first buckets.
struct SkippingNet : torch::nn::Module {
  explicit SkippingNet(const GroupArg& group) : norm(SyncBatchNormOptions(6).process_group(group)) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("last", last);
    register_module("side", side);
    set_waves(*this, {1});
    to(torch::kDouble);
  }
  at::Tensor inner(const at::Tensor& x, bool has_side) {
    return has_side ? first(x) + side(x) : first(x);
  }
  at::Tensor forward(const at::Tensor& x, bool has_side) { return last(norm(inner(x, has_side))); }

  torch::nn::Linear first{4, 6}, last{6, 2}, side{4, 6};
  SyncBatchNorm1d norm;
};

at::Tensor rows_of(int rank) { return whole_batch({{3, 4}, {}, at::kDouble}, rank); }

}  // namespace

TEST_CASE("ranks that skip different layers normalize in the same order", "[ranks]") {
  const bool is_static = GENERATE(false, true);
  CAPTURE(is_static);
  constexpr int kRanks = 2;
  std::vector<at::Tensor> expected;
  {
    SkippingNet net({});
    const auto inner = torch::cat({net.inner(rows_of(0), true), net.inner(rows_of(1), false)});
    net.last(net.norm(inner)).square().sum().div(kRanks).backward();
    expected = gradients_of(net);
  }
  const auto gradients = run_ranks<std::vector<at::Tensor>>(kRanks, [&](const Rank& self) {
    const auto net = std::make_shared<SkippingNet>(self.group);
    DistributedDataParallel<std::shared_ptr<SkippingNet>> model(
        net, DistributedDataParallelOptions()
                 .process_group(self.group)
                 .bucket_cap_mb(1e-6)
                 .find_unused_parameters(!is_static)
                 .static_graph(is_static));
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      model->forward(rows_of(self.rank), self.rank == 0).square().sum().backward();
    }
    return gradients_of(*net);
  });
  for (const auto& of_rank : gradients) CHECK(all_close(of_rank, expected, 1e-5, 1e-8));
}
