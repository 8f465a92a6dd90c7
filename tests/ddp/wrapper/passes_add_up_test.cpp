// Averaged passes before a zero_grad() add up: `.grad` of an earlier one is not averaged again.
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "ddp/wrapping.h"
#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp::passes_add_up {
namespace {

using namespace testing;

constexpr int kRanks = 3;
constexpr int64_t kWidth = 4;

class NetImpl : public torch::nn::Module {
 public:
  NetImpl() {
    first = register_module("first", torch::nn::Linear(kWidth, 5));
    extra = register_module("extra", torch::nn::Linear(5, 5));
    last = register_module("last", torch::nn::Linear(5, 1));
    to(at::kDouble);
    set_waves(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool with_extra) {
    auto y = torch::tanh(first(x));
    if (with_extra) y = y + torch::tanh(extra(y));
    return last(y).squeeze(1);
  }
  torch::nn::Linear first{nullptr}, extra{nullptr}, last{nullptr};
};
TORCH_MODULE(Net);

using Model = DistributedDataParallel<Net>;

std::vector<int64_t> rows_by_rank(Reduction reduction) {
  return reduction == Reduction::Mean ? std::vector<int64_t>{2, 2, 2}
                                      : std::vector<int64_t>{4, 2, 1};
}

at::Tensor rows_of_all(int pass, int64_t count) {
  auto x = torch::arange(count * kWidth, at::kDouble).view({count, kWidth});
  return torch::sin(x * 0.7 + 1.3 * pass);
}

at::Tensor rows_of(int pass, const Rank& self, Reduction reduction) {
  const auto rows = rows_by_rank(reduction);
  int64_t begin = 0, all = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank < self.rank) begin += rows[rank];
    all += rows[rank];
  }
  return rows_of_all(pass, all).narrow(0, begin, rows[self.rank]);
}

at::Tensor loss_of(const at::Tensor& y, Reduction reduction) {
  return reduction == Reduction::Sum ? y.square().sum() : y.square().mean();
}

// One process: the gradients of passes 0 to `passes`, added up; only the first ones use `extra`.
std::vector<at::Tensor> of_one_process(Reduction reduction, int passes, int with_extra) {
  Net net;
  const auto rows = rows_by_rank(reduction);
  for (int pass = 0; pass < passes; ++pass) {
    const auto y = net(rows_of_all(pass, rows[0] + rows[1] + rows[2]), pass < with_extra);
    loss_of(y, reduction).backward();
  }
  return gradients_of(*net);
}

}  // namespace

TEST_CASE("averaged passes add up to one process's gradient", "[ranks][ddp][many]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted);
  const bool as_views = GENERATE(false, true);
  const std::string mode = GENERATE("plain", "find_unused", "static_graph", "lazy");
  CAPTURE(static_cast<int>(reduction), as_views, mode);
  const bool skips = mode == "find_unused";
  const auto seen = run_ranks<double>(kRanks, [&](const Rank& self) {
    Net net;
    Model model(
        net, in(self)
                 .reduction(reduction)
                 .gradient_as_bucket_view(as_views)
                 .find_unused_parameters(skips)
                 .static_graph(mode == "static_graph")
                 .lazy_bucket_allocation(mode == "lazy"));
    double difference = 0;
    for (int step = 0; step < 4; ++step) {
      model->zero_grad(/*set_to_none=*/step % 2 == 0);
      for (int pass = 0; pass < 4; ++pass) {
        const auto x = rows_of(pass, self, reduction);
        const auto backward = [&] {
          loss_of(model->forward(x, !skips || pass == 0), reduction).backward();
        };
        if (pass == 2) {  // accumulates onto averages
          const auto guard = model->no_sync();
          backward();
          continue;
        }
        backward();
        const auto expected = of_one_process(reduction, pass + 1, skips ? 1 : 4);
        difference = std::max(difference, largest_difference(gradients_of(*net), expected));
      }
    }
    return difference;
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("backward passes through one forward pass add up", "[ranks][ddp][many]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted);
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<double>(kRanks, [&](const Rank& self) {
    Net net;
    Model model(net, in(self).reduction(reduction).gradient_as_bucket_view(as_views));
    double difference = 0;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const auto loss =
          loss_of(model->forward(rows_of(0, self, reduction), /*with_extra=*/true), reduction);
      for (int times = 1; times <= 3; ++times) {
        loss.backward({}, /*retain_graph=*/true);
        auto expected = of_one_process(reduction, 1, 1);
        for (auto& gradient : expected) gradient.mul_(times);
        difference = std::max(difference, largest_difference(gradients_of(*net), expected));
      }
    }
    return difference;
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("a pass in which no rank has a sample leaves the gradient as it is", "[ranks][ddp]") {
  const int ranks = GENERATE(1, 2);
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<double>(ranks, [&](const Rank& self) {
    Net net;
    Model model(
        net, in(self).reduction(Reduction::SampleWeighted).gradient_as_bucket_view(as_views));
    const auto x = torch::full({2, kWidth}, self.rank + 1.0, at::kDouble);
    model->forward(x, true).mean().backward();
    const auto before = gradients_of(*net);
    (model->forward(x.narrow(0, 0, 0), true).sum() * 0).backward();
    return largest_difference(gradients_of(*net), before) +
           (before[0].abs().sum().item<double>() > 0 ? 0 : 1);
  });
  for (const double difference : seen) CHECK(difference == 0);
}

namespace {

// The parts of a join: iteration i has two averaged passes on rows of its own.
struct Iteration {
  static at::Tensor rows(int iteration, int pass, int rank, Reduction reduction) {
    const int64_t count = reduction == Reduction::Mean ? 2 : rank + 1;
    const auto x = torch::arange(count * kWidth, at::kDouble).view({count, kWidth});
    return torch::sin(x * 0.9 + iteration + 0.3 * pass + 0.2 * rank);
  }
};

constexpr int kIterations[kRanks] = {3, 2, 1};

at::Tensor loss_of_active(Net& net, int iteration, int pass, Reduction reduction, bool by_active) {
  std::vector<at::Tensor> outputs;
  at::Tensor means = torch::zeros({}, at::kDouble);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (iteration >= kIterations[rank]) continue;
    outputs.push_back(net(Iteration::rows(iteration, pass, rank, reduction), true));
    means = means + outputs.back().square().mean();
  }
  if (reduction != Reduction::Mean) return loss_of(torch::cat(outputs), reduction);
  return means / (by_active ? static_cast<double>(outputs.size()) : kRanks);
}

// The weights after all iterations, in one process.
std::vector<at::Tensor> joined_in_one_process(
    Reduction reduction, bool by_active, bool steps_in_backward) {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int iteration = 0; iteration < kIterations[0]; ++iteration) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) {
      loss_of_active(net, iteration, pass, reduction, by_active).backward();
      if (steps_in_backward || pass == 1) optimizer.step();
    }
  }
  return net->parameters();
}

}  // namespace

TEST_CASE("averaged passes add up in a join, for ranks without input too", "[ranks][join][many]") {
  const auto reduction = GENERATE(Reduction::Mean, Reduction::Sum, Reduction::SampleWeighted);
  const std::string mode = GENERATE("optimizer", "sharded", "in backward");
  const bool by_active = GENERATE(false, true);
  const bool to_none = GENERATE(false, true);
  CAPTURE(static_cast<int>(reduction), mode, by_active, to_none);
  const auto expected = joined_in_one_process(reduction, by_active, mode == "in backward");
  const auto seen = run_ranks<double>(kRanks, [&](const Rank& self) {
    Net net;
    Model model(net, in(self).reduction(reduction));
    const torch::optim::SGDOptions options(0.05);
    std::vector<Joinable*> joinables{model.get()};
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (mode == "sharded") {
      auto sharded = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(model, options);
      joinables.push_back(sharded.get());
      optimizer = std::move(sharded);
    } else if (mode == "in backward") {
      model->step_in_backward(std::make_shared<torch::optim::SGD>(net->parameters(), options));
    } else {
      optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), options);
    }
    const auto body = [&] {
      for (int iteration = 0; iteration < kIterations[self.rank]; ++iteration) {
        model->zero_grad(to_none);
        for (int pass = 0; pass < 2; ++pass) {
          const auto x = Iteration::rows(iteration, pass, self.rank, reduction);
          loss_of(model->forward(x, true), reduction).backward();
        }
        if (optimizer) optimizer->step();
      }
    };
    join(joinables, body, JoinOptions().divide_by_initial_world_size(!by_active));
    return largest_difference(net->parameters(), expected);
  });
  for (const double difference : seen) CHECK(difference < 1e-12);
}

TEST_CASE("a communication hook gets what was added since the last pass", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self));
    std::vector<double> got;
    model->register_comm_hook([&, group = self.group](GradBucket& bucket) {
      got.push_back(bucket.buffer().item<double>());
      return hooks::all_reduce(group)(bucket);
    });
    for (int pass = 0; pass < 3; ++pass) {
      model->forward(torch::full({1, 1}, self.rank + 1.0)).sum().backward();
    }
    got.push_back(net->weight.grad().item<double>());
    return got;
  });
  CHECK(seen[0] == std::vector<double>{1, 1, 1, 4.5});
  CHECK(seen[1] == std::vector<double>{2, 2, 2, 4.5});
}

TEST_CASE("with create_graph the sum of two passes has the graphs of both", "[ranks][ddp]") {
  const bool as_views = GENERATE(false, true);
  const auto seen = run_ranks<double>(2, [&](const Rank& self) {
    auto net = make_linear(1, 2);
    DistributedDataParallel model(net, in(self).gradient_as_bucket_view(as_views));
    for (int pass = 0; pass < 2; ++pass) {
      const auto y = model->forward(torch::full({1, 1}, self.rank + 1.0));
      y.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    }
    const auto grad = std::exchange(net->weight.mutable_grad(), {});
    // 3 w^2 x^3, twice; its derivative is 6 w x^3.
    const auto second = torch::autograd::grad({grad.sum()}, {net->weight})[0].item<double>();
    const double x = self.rank + 1.0;
    return std::abs(grad.item<double>() - 2 * 12 * (1 + 8) / 2.0) +
           std::abs(second - 2 * 12 * x * x * x);
  });
  for (const double difference : seen) CHECK(difference < 1e-4);
}

TEST_CASE("sparse gradients of averaged passes add up", "[ranks][ddp]") {
  const auto seen = run_ranks<at::Tensor>(2, [](const Rank& self) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    DistributedDataParallel model(table, in(self).reduction(Reduction::Sum));
    const auto pass = [&](int row) { model->forward(torch::tensor({row})).sum().backward(); };
    pass(self.rank);
    pass(2);
    {
      const auto guard = model->no_sync();
      pass(3);
    }
    pass(self.rank);
    return table->weight.grad().to_dense();
  });
  const auto expected = torch::tensor({{2.0f, 2.0f}, {2.0f, 2.0f}, {2.0f, 2.0f}, {2.0f, 2.0f}});
  for (const auto& gradient : seen) CHECK(torch::equal(gradient, expected));
}

TEST_CASE("what a program does to an average in place stays done", "[ranks][ddp]") {
  const auto seen = run_ranks<std::vector<double>>(2, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self).reduction(Reduction::Sum));
    auto& grad = net->weight.mutable_grad();
    const auto pass = [&](double x) { model->forward(torch::full({1, 1}, x)).sum().backward(); };
    std::vector<double> results;
    pass(1);
    const auto first = grad;
    first.mul_(10);  // 20
    pass(1);
    results.push_back(grad.item<double>());
    results.push_back(grad.is_same(first));
    // A tensor of the program's is this rank's own gradient.
    grad = torch::full({1, 1}, self.rank + 1.0);
    pass(1);
    results.push_back(grad.item<double>());
    return results;
  });
  for (const auto& results : seen) CHECK(results == std::vector<double>{22, 1, 5});
}

TEST_CASE(
    "a change of the sum of an average and local gradients is an error on every rank",
    "[ranks][errors][ddp]") {
  const bool zeroes = GENERATE(false, true);
  const auto seen = run_ranks<std::string>(2, [&](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self).reduction(Reduction::Sum));
    const auto pass = [&] { model->forward(torch::ones({1, 1})).sum().backward(); };
    pass();
    {
      const auto guard = model->no_sync();
      pass();
    }
    if (zeroes) {
      model->zero_grad(/*set_to_none=*/false);
    } else if (self.rank == 0) {
      net->weight.mutable_grad().mul_(0.5);
    }
    auto error = error_of(pass);
    model->zero_grad();
    pass();
    return error + std::to_string(net->weight.grad().item<int>());
  });
  for (const auto& text : seen) {
    if (zeroes) {
      CHECK(text == "2");
    } else {
      CHECK_THAT(
          text, Catch::Contains("expected .grad as a backward pass inside no_sync() left it, or "
                                "zeros, got one that was changed in place for 1 of 1 parameter "
                                "(weight) on rank 0 of 2."));
    }
  }
}

TEST_CASE("a step goes on after a backward pass that threw in a group of one", "[ranks][ddp]") {
  const auto seen = run_ranks<double>(1, [](const Rank& self) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel model(net, in(self));
    bool throws = false;
    net->weight.register_hook([&](const at::Tensor&) {
      if (throws) throw std::runtime_error("a hook threw");
    });
    const auto pass = [&] { model->forward(torch::ones({1, 1})).sum().backward(); };
    pass();
    throws = true;
    error_of(pass);
    throws = false;
    model->zero_grad();
    pass();
    return net->weight.grad().item<double>();
  });
  CHECK(seen[0] == 1);
}

}  // namespace ddp::passes_add_up
