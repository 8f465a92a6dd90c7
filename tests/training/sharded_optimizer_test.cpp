// Checkpointer and GradScaler with optimizers whose state, or gradients, are divided among ranks.
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ddp/checkpointer.h>
#include <ddp/grad_scaler.h>
#include <ddp/state_dict.h>
#include <ddp/zero.h>
#include <torch/torch.h>

#include "support/compare.h"
#include "support/nets.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

using Net = torch::nn::Sequential;
using Tensors = std::vector<at::Tensor>;

constexpr int kPlain = 0;  // the optimizer without sharding

Net wavy_net(int64_t hidden) {
  Net net(torch::nn::Linear(5, hidden), torch::nn::Tanh(), torch::nn::Linear(hidden, 3));
  set_waves(*net, {1, 1, 0});
  return net;
}

/// One rank's run. All ranks train on the same data: averages do not depend on their number.
struct ShardedRun {
  explicit ShardedRun(const Rank& self, int stage, int64_t hidden = 11)
      : net(wavy_net(hidden)),
        model(
            net, DistributedDataParallelOptions().process_group(self.group).bucket_cap_mb(0.0002)),
        optimizer(make(stage)) {}

  void train(int64_t first, int64_t end) {
    for (auto step = first; step < end; ++step) {
      clear();
      loss(step).backward();
      optimizer->step();
    }
  }

  at::Tensor loss(int64_t step) {
    const auto x = torch::cos(torch::arange(20.0).view({4, 5}) * static_cast<double>(step + 1));
    return model->forward(x).square().mean();
  }

  void clear() { zero_grad(*optimizer); }

  Tensors values() const { return copies_of(net->parameters()); }

  Net net;
  DistributedDataParallel<Net> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;

 private:
  std::unique_ptr<torch::optim::Optimizer> make(int stage) {
    const auto options = AdamWOptions(0.02).weight_decay(0.1);
    if (stage == kPlain) return std::make_unique<AdamW>(model->parameters(), options);
    return std::make_unique<ZeroRedundancyOptimizer<AdamW>>(
        model, options, ZeroOptions().stage(stage));
  }
};

CheckpointerOptions checkpointer_options(const Rank& self) {
  return CheckpointerOptions().process_group(self.group);
}

/// Returns the parameters after three more steps of a run that was loaded from a checkpoint.
Tensors resumed(const Rank& self, const std::string& folder, int stage) {
  ShardedRun run(self, stage);
  Checkpointer checkpointer(folder, checkpointer_options(self));
  checkpointer.add("model", run.model).add("optimizer", *run.optimizer);
  const auto step = checkpointer.load_latest().value();
  run.train(step, step + 3);
  return run.values();
}

}  // namespace

TEST_CASE("a sharded optimizer's checkpoint loads on any number of ranks", "[zero][ranks]") {
  const int stage = GENERATE(1, 2);
  const TemporaryFolder folder;
  const auto whole = run_ranks<Tensors>(4, [&](const Rank& self) {
    ShardedRun run(self, stage);
    Checkpointer checkpointer(folder.path(), checkpointer_options(self));
    checkpointer.add("model", run.model).add("optimizer", *run.optimizer);
    run.train(0, 3);
    checkpointer.save(3);
    run.train(3, 6);  // the save is written during these steps
    checkpointer.wait();
    return run.values();
  });
  for (const int reader : {kPlain, 1, 2}) {
    for (const int world : {1, 2, 4}) {
      CAPTURE(stage, reader, world);
      const auto ends = run_ranks<Tensors>(
          world, [&](const Rank& self) { return resumed(self, folder.path(), reader); });
      for (const auto& end : ends) CHECK(largest_difference(end, whole[0]) < 1e-6);
      if (world == 4 && reader == stage) CHECK(largest_difference(ends[0], whole[0]) == 0);
    }
  }
  // The file equals that of the optimizer without sharding, and holds each number once.
  const auto net = wavy_net(11);
  AdamW plain(net->parameters(), AdamWOptions(1.0));
  load_state_dict(plain, folder.path() + "/step-00000003/optimizer.pt");
  CHECK(plain.param_groups()[0].options().get_lr() == 0.02);
  CHECK(plain.state().size() == net->parameters().size());
}

TEST_CASE("a sharded optimizer refuses a checkpoint that does not fit", "[zero][ranks][errors]") {
  const TemporaryFolder folder;
  const auto save = [&](const Rank& self, int64_t hidden) {
    ShardedRun run(self, 1, hidden);
    run.train(0, 1);
    Checkpointer checkpointer(folder.path(), checkpointer_options(self));
    checkpointer.add("optimizer", *run.optimizer).save(1);
    checkpointer.wait();
  };
  for (const auto& error : errors_of_ranks(2, [&](const Rank& self) { save(self, 11); })) {
    REQUIRE(error == "");
  }
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    ShardedRun run(self, 2, 12);
    Checkpointer checkpointer(folder.path(), checkpointer_options(self));
    checkpointer.add("optimizer", *run.optimizer).load_latest();
  });
  CHECK(errors[0].find("optimizer.pt") != std::string::npos);
  CHECK(errors[0] == errors[1]);
  const auto of_ranks = errors_of_ranks(2, [&](const Rank& self) {
    ShardedRun run(self, 1);
    Checkpointer checkpointer(folder.path(), checkpointer_options(self));
    checkpointer.add_per_rank("own", *run.optimizer).save(2);
  });
  for (const auto& error : of_ranks) CHECK(error.find("Call add().") != std::string::npos);
}

TEST_CASE("an infinity in one rank's share skips the step of all", "[zero][ranks]") {
  const int stage = GENERATE(1, 2);
  // With stage 1 every rank has all gradients, with stage 2 only one rank's share has the infinity.
  struct Steps {
    std::vector<int64_t> taken;
    Tensors values;
    double scale = 0;
  };
  const auto results = run_ranks<Steps>(2, [&](const Rank& self) {
    ShardedRun run(self, stage);
    auto& sharded = static_cast<ZeroRedundancyOptimizerBase&>(*run.optimizer);
    GradScaler scaler(GradScalerOptions().init_scale(1024));
    Steps steps;
    for (int64_t step = 0; step < 4; ++step) {
      run.clear();
      scaler.scale(run.loss(step)).backward();
      if (step == 1 && (stage == 1 || self.rank == 1)) {
        sharded.gradients().at(0).fill_(std::numeric_limits<float>::infinity());
      }
      steps.taken.push_back(scaler.step(sharded));
      scaler.update();
    }
    steps.values = run.values();
    steps.scale = scaler.get_scale();
    return steps;
  });
  const auto plain = run_ranks<Tensors>(2, [](const Rank& self) {
    ShardedRun run(self, kPlain);
    run.train(0, 1);
    run.train(2, 4);
    return run.values();
  });
  for (const auto& result : results) {
    CHECK(result.taken == std::vector<int64_t>{1, 0, 1, 1});
    CHECK(result.scale == 512);
    CHECK(largest_difference(result.values, plain[0]) == 0);  // scales are powers of two: exact
  }
}

TEST_CASE("a skipped step leaves no gradients in shares", "[zero][ranks]") {
  const auto taken = run_ranks<int>(2, [](const Rank& self) {
    ShardedRun run(self, 2);
    auto& sharded = static_cast<ZeroRedundancyOptimizerBase&>(*run.optimizer);
    GradScaler scaler;
    run.loss(0).backward();
    if (self.rank == 0) sharded.gradients().at(0).fill_(std::numeric_limits<float>::quiet_NaN());
    const bool first = scaler.step(sharded);
    scaler.update();
    run.loss(1).backward();  // without zero_grad()
    return static_cast<int>(first) * 10 + static_cast<int>(scaler.step(sharded));
  });
  CHECK(taken == std::vector<int>{1, 1});
}

TEST_CASE("a scaler refuses an optimizer that steps in backward", "[zero][ranks][errors]") {
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    const Net net = wavy_net(4);
    DistributedDataParallel<Net> model(
        net, DistributedDataParallelOptions().process_group(self.group));
    ZeroRedundancyOptimizer<AdamW> optimizer(model, AdamWOptions(0.1), ZeroOptions().overlap(true));
    GradScaler scaler;
    scaler.step(optimizer);
  });
  for (const auto& error : errors) CHECK(error.find("Set overlap(false).") != std::string::npos);
}

}  // namespace ddp
