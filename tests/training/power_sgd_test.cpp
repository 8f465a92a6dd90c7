// Compares PowerSGD with Python's, whose runs are recorded in fixtures/power_sgd.txt.
#include <ddp/power_sgd.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "training/compression/low_rank.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::hooks::PowerSGD;
using ddp::hooks::PowerSGDOptions;

torch::Tensor waves(torch::IntArrayRef shape, double speed, double start) {
  const auto count = c10::multiply_integers(shape);
  return torch::sin(torch::arange(count, torch::kDouble) * speed + start)
      .view(shape)
      .to(torch::kFloat);
}

// The model of record_power_sgd.py, and one rank's run.
struct PowerRun {
  PowerRun(const Rank& self, const PowerSGDOptions& options, double bucket_cap_mb = 25)
      : rank(self.rank),
        net(torch::nn::Linear(8, 6), torch::nn::Tanh(),
            torch::nn::Linear(torch::nn::LinearOptions(6, 6).bias(false)), torch::nn::Tanh(),
            torch::nn::Linear(6, 6)),
        model(
            filled(net), ddp::DistributedDataParallelOptions()
                             .process_group(self.group)
                             .bucket_cap_mb(bucket_cap_mb)),
        hook(options, self.group),
        optimizer(model->parameters(), 0.1) {
    model->register_comm_hook(hook);
  }

  void train(int64_t first, int64_t end) {
    for (auto step = first; step < end; ++step) {
      optimizer.zero_grad();
      const auto x = waves({5, 8}, 0.3 + rank, static_cast<double>(step));
      model->forward(x).square().mean().backward();
      optimizer.step();
    }
  }

  torch::Tensor values() const { return flattened(net->parameters()); }

  static torch::nn::Sequential filled(torch::nn::Sequential net) {
    set_waves(*net, {0.7, 0, 1, 0.5});
    return net;
  }

  int rank;
  torch::nn::Sequential net;
  ddp::DistributedDataParallel<torch::nn::Sequential> model;
  PowerSGD hook;
  torch::optim::SGD optimizer;
};

PowerSGDOptions of_rank(int64_t rank) {
  return PowerSGDOptions().matrix_approximation_rank(rank).start_iter(2).min_compression_rate(0.5);
}

struct Recorded {
  int64_t numel_before = 0;
  int64_t numel_after = 0;
  std::vector<float> values;
};

Recorded recorded(const std::string& name) {
  std::ifstream file(DDP_FIXTURES "/power_sgd.txt");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string found;
    Recorded run;
    size_t count = 0;
    words >> found >> run.numel_before >> run.numel_after >> count;
    if (found != name) continue;
    run.values.resize(count);
    for (auto& value : run.values) words >> value;
    return run;
  }
  return {};
}

}  // namespace

TEST_CASE("PowerSGD ends with the parameters of Python's", "[power_sgd][ranks]") {
  const std::map<std::string, PowerSGDOptions> cases{
      {"rank_1", of_rank(1)},
      {"rank_2", of_rank(2)},
      {"rank_4", of_rank(4)},
      {"cold", of_rank(2).warm_start(false)},
      {"no_feedback", of_rank(2).use_error_feedback(false)},
      {"batched", of_rank(2).batch_tensors_with_same_shape(true)},
      {"epsilon", of_rank(2).orthogonalization_epsilon(1e-3).random_seed(7)},
  };
  for (const auto& [name, options] : cases) {
    CAPTURE(name);
    const auto expected = recorded(name);
    REQUIRE(expected.values.size() == 132);
    struct Outcome {
      torch::Tensor values;
      ddp::hooks::CompressionStats stats;
    };
    const auto outcomes = run_ranks<Outcome>(2, [options = options](const Rank& self) {
      PowerRun run(self, options);
      run.train(0, 10);
      return Outcome{run.values(), run.hook.stats()};
    });
    for (const auto& outcome : outcomes) {
      CHECK((outcome.values - torch::tensor(expected.values)).abs().max().item<float>() < 1e-6F);
      CHECK(torch::equal(outcome.values, outcomes[0].values));
      CHECK(outcome.stats.numel_before == expected.numel_before);
      CHECK(outcome.stats.numel_after == expected.numel_after);
    }
  }
}

TEST_CASE("PowerSGD continues from a checkpoint as if uninterrupted", "[power_sgd][ranks]") {
  const TemporaryFolder folder;
  const auto whole = run_ranks<torch::Tensor>(2, [](const Rank& self) {
    PowerRun run(self, of_rank(1));
    run.train(0, 10);
    return run.values();
  });
  const auto checkpointer_of = [&](const Rank& self, PowerRun& run) {
    ddp::Checkpointer checkpointer(
        folder.path(), ddp::CheckpointerOptions().process_group(self.group));
    checkpointer.add("model", run.model).add("optimizer", run.optimizer);
    checkpointer.add_per_rank("hook", run.hook);
    return checkpointer;
  };
  run_ranks<int>(2, [&](const Rank& self) {
    PowerRun run(self, of_rank(1));
    auto checkpointer = checkpointer_of(self, run);
    run.train(0, 6);
    checkpointer.save(6);
    checkpointer.wait();
    return 0;
  });
  const auto resumed = run_ranks<torch::Tensor>(2, [&](const Rank& self) {
    PowerRun run(self, of_rank(1));
    // One step makes the buckets equal to those of the saved run.
    run.train(0, 1);
    auto checkpointer = checkpointer_of(self, run);
    checkpointer.load(6);
    run.train(6, 10);
    return run.values();
  });
  for (const auto& values : resumed) CHECK(torch::equal(values, whole[0]));
}

TEST_CASE("PowerSGD of full rank loses nothing, whatever the buckets", "[power_sgd][ranks]") {
  const double bucket_cap_mb = GENERATE(25.0, 0.0002);
  const auto options = of_rank(6).min_compression_rate(0.1);
  const auto compressed = run_ranks<torch::Tensor>(2, [&](const Rank& self) {
    PowerRun run(self, options, bucket_cap_mb);
    run.train(0, 8);
    return run.values();
  });
  const auto plain = run_ranks<torch::Tensor>(2, [&](const Rank& self) {
    PowerRun run(self, PowerSGDOptions(options).start_iter(100), bucket_cap_mb);
    run.train(0, 8);
    return run.values();
  });
  CHECK(torch::equal(compressed[0], compressed[1]));
  CHECK((compressed[0] - plain[0]).abs().max().item<float>() < 1e-5F);
}

TEST_CASE("PowerSGD in a join sends the error of ranks without input", "[power_sgd][ranks]") {
  const double cap = GENERATE(25.0, 0.0002);
  const auto ends = run_ranks<torch::Tensor>(3, [&](const Rank& self) {
    PowerRun run(self, PowerSGDOptions().start_iter(2).min_compression_rate(0.1), cap);
    run.model->join([&] { run.train(0, 4 + 2 * self.rank); });
    // The hook counts the same steps on all ranks: they stay equal when they train on.
    run.train(10, 13);
    return run.values();
  });
  CHECK(torch::isfinite(ends[0]).all().item<bool>());
  for (const auto& end : ends) CHECK(torch::equal(end, ends[0]));
}

TEST_CASE("a gradient that is zero stays zero under PowerSGD", "[power_sgd][ranks]") {
  const auto gradients = run_ranks<torch::Tensor>(2, [](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().process_group(self.group));
    PowerSGD hook(of_rank(2), self.group);
    model->register_comm_hook(hook);
    for (int step = 0; step < 5; ++step) {
      net->zero_grad();
      (model->forward(torch::ones({2, 8})) * 0).sum().backward();
    }
    return net->parameters()[0].grad();
  });
  for (const auto& gradient : gradients) CHECK(torch::equal(gradient, torch::zeros({8, 8})));
}

TEST_CASE("a gradient is sent again after steps in which it was zero", "[power_sgd][ranks]") {
  const int64_t rank = GENERATE(1, 2, 4);
  const auto shares = run_ranks<float>(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(8, 8).bias(false)));
    ddp::DistributedDataParallel model(
        net, ddp::DistributedDataParallelOptions().process_group(self.group));
    model->register_comm_hook(PowerSGD(of_rank(rank), self.group));
    const auto x = waves({6, 8}, 0.3, 0);
    const auto y = waves({6, 8}, 0.4, 1);
    for (int step = 0; step < 6; ++step) {
      net->zero_grad();
      (model->forward(x) * y).sum().mul(step < 5 ? 0 : 1).backward();
    }
    const auto whole = y.t().mm(x);
    return net->parameters()[0].grad().mul(whole).sum().div(whole.square().sum()).item<float>();
  });
  CAPTURE(rank);
  for (const auto share : shares) CHECK(share > 0.1);
}

TEST_CASE("PowerSGD's seeds are NumPy's", "[power_sgd][pure]") {
  ddp::SeedSequence seeds(0);
  const std::vector<uint32_t> expected{209652396, 398764591, 924231285, 404868288, 441365315};
  for (const auto seed : expected) CHECK(seeds.next() == seed);
  const auto after = seeds.next();
  ddp::SeedSequence again(0);
  again.restore(static_cast<int64_t>(expected.size()));
  CHECK(again.next() == after);
}

TEST_CASE("orthogonalize makes columns orthonormal", "[power_sgd][pure]") {
  const int64_t columns = GENERATE(1, 2, 4);
  auto matrices = waves({3, 9, columns}, 0.7, 0);
  ddp::orthogonalize(matrices, 0);
  const auto products = matrices.transpose(1, 2).bmm(matrices);
  CHECK(torch::allclose(products, torch::eye(columns).expand_as(products), 0, 1e-5));
}

TEST_CASE("orthogonalize replaces columns that depend on others", "[power_sgd][pure]") {
  const auto [dtype, tolerance] = GENERATE(
      std::pair(torch::kFloat, 1e-4), std::pair(torch::kDouble, 1e-5),
      std::pair(torch::kHalf, 0.06), std::pair(torch::kBFloat16, 0.1));
  const int64_t rows = GENERATE(9, 5000, 70000);
  const auto kind = GENERATE(as<std::string>(), "zeros", "multiples", "of one row");
  CAPTURE(dtype, rows, kind);
  const auto column = waves({1, rows, 1}, 0.7, 0).to(dtype);
  auto matrices = column * torch::tensor({2.0, -0.3}, dtype);
  if (kind == "zeros") matrices.zero_();
  if (kind == "of one row") {
    // The input that PowerSGD makes: a gradient of one row times two orthonormal columns.
    auto columns = waves({1, 500, 2}, 0.3, 1).to(torch::kDouble);
    columns = std::get<0>(at::linalg_qr(columns)).to(dtype);
    const auto row = waves({1, 1, 500}, 0.9, 2).to(dtype);
    matrices = (column * row).bmm(columns);
  }
  ddp::orthogonalize(matrices, 0);
  const auto wide = matrices.to(torch::kDouble);
  const auto products = wide.transpose(1, 2).bmm(wide);
  CHECK(torch::allclose(products, torch::eye(2, torch::kDouble).expand_as(products), 0, tolerance));
}

TEST_CASE("PowerSGD refuses options out of their range", "[power_sgd][errors][ranks]") {
  const auto error = [](const PowerSGDOptions& options) {
    return errors_of_ranks(1, [&](const Rank& self) { PowerSGD(options, self.group); })[0];
  };
  CHECK_THAT(error(of_rank(0)), ContainsText("matrix_approximation_rank to be at least 1, got 0"));
  CHECK_THAT(error(of_rank(1).start_iter(1)), ContainsText("start_iter to be at least 2"));
  CHECK(error(of_rank(1).start_iter(0).warm_start(false).use_error_feedback(false)).empty());
  CHECK_THAT(error(of_rank(1).min_compression_rate(0)), ContainsText("to be above 0, got 0"));
  CHECK_THAT(error(of_rank(1).orthogonalization_epsilon(-1)), ContainsText("at least 0, got -1"));
  CHECK_THAT(error(of_rank(1).random_seed(-1)), ContainsText("got -1"));
}
