// When a training has the same bits as another one: a case for each line of
// docs/reproducibility.md.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/distributed_data_parallel.h>
#include <ddp/set_deterministic.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/nets.h"
#include "support/ranks.h"

using ddp::testing::Rank;
using ddp::testing::run_ranks;

namespace {

constexpr int kRanks = 4;
constexpr int kSteps = 4;

torch::nn::Sequential make_layers() {
  using torch::nn::Linear;
  torch::nn::Sequential net(
      Linear(32, 400), torch::nn::Tanh(), Linear(400, 300), torch::nn::Tanh(), Linear(300, 5));
  ddp::testing::draw_normal(*net, 0.1);
  return net;
}

struct Training {
  std::string backend = "shm";
  int ranks = kRanks;
  ddp::DistributedDataParallelOptions options;
  int zero_stage = 0;
  bool steps_in_backward = false;
};

void step_once(
    ddp::DistributedDataParallel<torch::nn::Sequential>& model, const at::Tensor& input) {
  torch::mse_loss(model->forward(input), input.slice(1, 0, 5)).backward();
}

// The parameters of rank 0 after some steps of training in float32, as one vector.
at::Tensor train(const Training& training) {
  const auto body = [&](const Rank& self) {
    auto net = make_layers();
    auto options = training.options;
    options.process_group(self.group);
    ddp::DistributedDataParallel model(net, options);
    const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9);
    const auto plain = std::make_shared<torch::optim::SGD>(model->parameters(), sgd);
    std::unique_ptr<ddp::ZeroRedundancyOptimizer<torch::optim::SGD>> sharded;
    if (training.zero_stage > 0) {
      sharded = std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::SGD>>(
          model, sgd, ddp::ZeroOptions().stage(training.zero_stage));
    }
    if (training.steps_in_backward) model->step_in_backward(plain);
    for (int step = 0; step < kSteps; ++step) {
      const auto input = ddp::testing::draw_values(
          {16, 32}, static_cast<uint64_t>(100 * step + self.rank), at::kFloat);
      step_once(model, input);
      if (sharded) {
        sharded->step();
        sharded->zero_grad();
      } else {
        if (!training.steps_in_backward) plain->step();
        plain->zero_grad();
      }
    }
    return torch::nn::utils::parameters_to_vector(model->parameters()).detach().clone();
  };
  return run_ranks<at::Tensor>(training.ranks, body, ddp::testing::over(training.backend))[0];
}

bool equal_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

Training with(const std::function<void(ddp::DistributedDataParallelOptions&)>& change) {
  Training training;
  change(training.options);
  return training;
}

}  // namespace

TEST_CASE("equal bits: a repeated run, over each backend", "[ranks][once]") {
  for (const std::string backend : {"shm", "gloo", "two_hosts", "shm_direct"}) {
    Training training;
    training.backend = backend;
    INFO(backend);
    CHECK(equal_bits(train(training), train(training)));
  }
}

TEST_CASE("equal bits: options of the wrapper over shared memory", "[ranks][once]") {
  const auto base = train({});
  CHECK(equal_bits(base, train(with([](auto& o) { o.bucket_cap_mb(0.01); }))));
  CHECK(equal_bits(base, train(with([](auto& o) { o.bucket_cap_mb(100); }))));
  CHECK(equal_bits(base, train(with([](auto& o) { o.gradient_as_bucket_view(true); }))));
  CHECK(equal_bits(base, train(with([](auto& o) { o.find_unused_parameters(true); }))));
  CHECK(equal_bits(base, train(with([](auto& o) { o.static_graph(true); }))));
  Training direct;
  direct.backend = "shm_direct";
  CHECK(equal_bits(base, train(direct)));
  Training in_backward;
  in_backward.steps_in_backward = true;
  CHECK(equal_bits(base, train(in_backward)));
  for (const int stage : {1, 2}) {
    Training sharded;
    sharded.zero_stage = stage;
    INFO(stage);
    CHECK(equal_bits(base, train(sharded)));
  }
}

TEST_CASE("equal bits: two ranks over any backend, with any buckets", "[ranks][once]") {
  Training base;
  base.ranks = 2;
  const auto expected = train(base);
  for (const std::string backend : {"gloo", "two_hosts", "shm_direct"}) {
    for (const double cap : {0.01, 100.0}) {
      auto other = base;
      other.backend = backend;
      other.options.bucket_cap_mb(cap);
      INFO(backend << " " << cap);
      CHECK(equal_bits(expected, train(other)));
    }
  }
}

TEST_CASE("other bits: more than two ranks over another backend", "[ranks][once]") {
  const auto base = train({});
  for (const std::string backend : {"gloo", "two_hosts"}) {
    Training other;
    other.backend = backend;
    const auto result = train(other);
    INFO(backend);
    CHECK_FALSE(equal_bits(base, result));
    CHECK(at::allclose(base, result, 1e-4, 1e-5));
  }
}

TEST_CASE("other bits: other sizes of buckets over Gloo", "[ranks][once]") {
  Training base;
  base.backend = "gloo";
  auto other = base;
  other.options.bucket_cap_mb(0.01);
  CHECK_FALSE(equal_bits(train(base), train(other)));
}

TEST_CASE("other bits: another number of ranks", "[ranks][once]") {
  Training two;
  two.ranks = 2;
  CHECK_FALSE(equal_bits(train({}), train(two)));
}

TEST_CASE("other bits: another number of threads", "[pure]") {
  const auto values = ddp::testing::draw_values({1 << 20}, 1, at::kFloat);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto by_one = values.sum();
  at::set_num_threads(2);
  const auto by_two = values.sum();
  at::set_num_threads(threads);
  CHECK_FALSE(equal_bits(by_one, by_two));
}

TEST_CASE("equal bits: what is drawn after set_deterministic", "[pure]") {
  const auto draw = [] {
    ddp::set_deterministic(7);
    return at::randn({100});
  };
  const auto first = draw();
  CHECK(equal_bits(first, draw()));
  CHECK(at::globalContext().deterministicAlgorithms());
  CHECK(at::globalContext().deterministicCuDNN());
  CHECK_FALSE(at::globalContext().benchmarkCuDNN());
  CHECK(std::string(std::getenv("CUBLAS_WORKSPACE_CONFIG")) == ":4096:8");
  ddp::set_deterministic(7, /*deterministic_algorithms=*/false);
  CHECK_FALSE(at::globalContext().deterministicAlgorithms());
  CHECK_FALSE(at::globalContext().deterministicCuDNN());
  CHECK(equal_bits(first, at::randn({100})));
}
