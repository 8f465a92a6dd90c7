// Pipelines of wrappers: replicas of stages, and stages that are sharded.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr int64_t kReplicaRows = 10;  // of the whole batch

struct ReplicaPlan {
  ddp::PipelineSchedule schedule = ddp::PipelineSchedule::OneFOneB;
  int64_t chunks = 1;
  int64_t microbatches = 4;
  bool reduce_each = false;
};

/// What a rank finds after training in a mesh of 2 stages and 2 replicas.
struct ReplicaOutcome {
  double difference = 0;    // from one process
  double of_replicas = 0;   // 0: equal to the bit
  int64_t all_reduces = 0;  // of one step
};

/// Two buckets: one for the weight, one for the bias.
ddp::DistributedDataParallelOptions replicas(const ddp::ProcessGroup& dp) {
  return ddp::DistributedDataParallelOptions().process_group(dp).bucket_cap_mb(1e-5);
}

/// Four steps of a pipeline in a mesh of 2 stages ("pp") and 2 replicas ("dp"), which share a
/// batch, and of one process.
///
/// \param around  gets the pipeline's part of a step, and calls it.
void train_beside_whole(
    const ddp::DeviceMesh& mesh, ddp::PipelineStageBase& pipeline, WholeNet& whole,
    const std::function<void(const std::function<void()>& step)>& around) {
  const int stage = mesh.rank("pp");
  const auto own = [&](const at::Tensor& t) {
    return t.chunk(2)[static_cast<size_t>(mesh.rank("dp"))];
  };
  auto whole_optimizer = pipeline_optimizer(whole.parameters());
  auto optimizer = pipeline_optimizer(pipeline.parameters());
  for (int64_t s = 0; s < 4; ++s) {
    const auto batch = pipeline_batch(kReplicaRows, s);
    whole_optimizer.zero_grad();
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    whole_optimizer.step();
    optimizer.zero_grad();
    std::vector<at::Tensor> inputs;
    if (stage == 0) inputs.push_back(own(batch.input));
    around([&] { pipeline.step(inputs, stage == 1 ? own(batch.target) : at::Tensor()); });
    optimizer.step();
  }
}

ReplicaOutcome train_replicas(const Rank& self, const ReplicaPlan& plan) {
  const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
  const auto dp = mesh.group("dp");
  const int stage = mesh.rank("pp");
  using Model = ddp::DistributedDataParallel<Layer>;
  WholeNet whole(2 * plan.chunks);
  std::vector<Model> models;
  for (int64_t c = 0; c < plan.chunks; ++c) models.emplace_back(Layer(2 * c + stage), replicas(dp));
  ddp::PipelineStage pipeline(
      models, stage, 2, pipeline_loss,
      ddp::PipelineOptions()
          .process_group(mesh.group("pp"))
          .schedule(plan.schedule)
          .microbatches(plan.microbatches)
          .reduce_each(plan.reduce_each));
  ReplicaOutcome outcome;
  train_beside_whole(mesh, pipeline, whole, [&](const auto& step) {
    const CountedCalls calls;
    step();
    outcome.all_reduces = calls.of("c10d::allreduce_");
  });
  for (size_t c = 0; c < models.size(); ++c) {
    const auto& expected = whole.layers[2 * c + static_cast<size_t>(stage)];
    outcome.difference = std::max(
        outcome.difference, largest_difference(expected->parameters(), models[c]->parameters()));
  }
  for (const auto& p : pipeline.parameters()) {
    std::vector<at::Tensor> all{at::empty_like(p), at::empty_like(p)};
    ddp::all_gather(all, p.detach(), dp);
    outcome.of_replicas = std::max(outcome.of_replicas, largest_difference({all[0]}, {all[1]}));
  }
  return outcome;
}

TEST_CASE(
    "replicas of stages stay equal, train as one process, and reduce each bucket once a step") {
  using S = ddp::PipelineSchedule;
  const auto plan = GENERATE(
      ReplicaPlan{S::OneFOneB, 1, 1}, ReplicaPlan{S::OneFOneB, 1, 4}, ReplicaPlan{S::GPipe, 1, 4},
      ReplicaPlan{S::Interleaved, 2, 4});
  CAPTURE(static_cast<int>(plan.schedule), plan.microbatches);
  const auto outcomes =
      run_ranks<ReplicaOutcome>(4, [&](const Rank& self) { return train_replicas(self, plan); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.of_replicas == 0);
    CHECK(outcome.all_reduces == 2 * plan.chunks);
  }
}

TEST_CASE("reduce_each reduces in each backward, with the same result") {
  ReplicaPlan plan;
  plan.reduce_each = true;
  const auto outcomes =
      run_ranks<ReplicaOutcome>(4, [&](const Rank& self) { return train_replicas(self, plan); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.of_replicas == 0);
    CHECK(outcome.all_reduces == 2 * plan.microbatches);
  }
}

/// Uses its argument in every other forward only.
struct DetachingImpl : torch::nn::Module {
  DetachingImpl() : layer(register_module("layer", Layer(1))) {}
  at::Tensor forward(const at::Tensor& x) {
    return layer->forward(++forwards % 2 == 0 ? x.detach() : x);
  }
  Layer layer;
  int64_t forwards = 0;
};
TORCH_MODULE(Detaching);

TEST_CASE("a stage without a gradient in its last backward still reduces with the other replicas") {
  const auto differences = run_ranks<double>(4, [](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const auto dp = mesh.group("dp");
    const auto options = ddp::PipelineOptions().process_group(mesh.group("pp")).microbatches(2);
    const auto batch = pipeline_batch(4, dp->getRank());
    if (mesh.rank("pp") == 1) {
      ddp::DistributedDataParallel model(Detaching(), replicas(dp));
      ddp::PipelineStage(model, 1, 2, pipeline_loss, options).step({}, batch.target);
      return 0.0;
    }
    ddp::DistributedDataParallel model(Layer(0), replicas(dp));
    ddp::PipelineStage(model, 0, 2, ddp::LossFn(), options).step({batch.input}, {});
    // Half of the batch of each replica.
    WholeNet whole(2);
    for (int64_t r = 0; r < 2; ++r) {
      const auto part = pipeline_batch(4, r);
      const auto loss =
          pipeline_loss(whole.forward(part.input.slice(0, 0, 2)), part.target.slice(0, 0, 2));
      (loss / 4).backward();
    }
    return largest_difference(
        {whole.layers[0]->fc->weight.grad()}, {model->module()->fc->weight.grad()});
  });
  for (const auto difference : differences) CHECK(difference < 1e-12);
}

/// A stage of two units and a root without parameters.
struct UnitsImpl : torch::nn::Module {
  using Unit = ddp::FullyShardedDataParallel<Layer>;
  UnitsImpl(int64_t first, const ddp::FullyShardedOptions& options)
      : one(register_module("one", Unit(Layer(first), options))),
        two(register_module("two", Unit(Layer(first + 1), options))) {}
  at::Tensor forward(const at::Tensor& x) { return two->forward(one->forward(x)); }
  Unit one, two;
};
TORCH_MODULE(Units);

struct ShardedOutcome {
  double difference = 0;
  std::vector<int64_t> gathers, reductions;  // of a step, by unit: the root first
  int64_t all_reduces = 0;                   // of the last step
};

ShardedOutcome train_sharded(
    const Rank& self, std::optional<bool> reshard_after_forward, bool reduce_each,
    int64_t microbatches = 4) {
  const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
  const auto dp = mesh.group("dp");
  const int stage = mesh.rank("pp");
  WholeNet whole(4);
  auto options =
      ddp::FullyShardedOptions().process_group(dp).reshard_after_forward(reshard_after_forward);
  ddp::FullyShardedDataParallel model(Units(2 * stage, options), options);
  ddp::PipelineStage pipeline(
      model, stage, 2, pipeline_loss,
      ddp::PipelineOptions()
          .process_group(mesh.group("pp"))
          .microbatches(microbatches)
          .reduce_each(reduce_each));
  ShardedOutcome outcome;
  ddp::FullyShardedStats before;
  train_beside_whole(mesh, pipeline, whole, [&](const auto& step) {
    before = model->stats();
    const CountedCalls calls;
    step();
    outcome.all_reduces = calls.of("c10d::allreduce_");
  });
  const auto after = model->stats();
  for (size_t i = 0; i < after.units.size(); ++i) {
    outcome.gathers.push_back(after.units[i].gathers - before.units[i].gathers);
    outcome.reductions.push_back(after.units[i].reductions - before.units[i].reductions);
  }
  const ddp::SummonFullParams summoned(*model);
  std::vector<at::Tensor> expected;
  for (size_t k = 0; k < 2; ++k) {
    for (const auto& p : whole.layers[2 * static_cast<size_t>(stage) + k]->parameters()) {
      expected.push_back(p);
    }
  }
  outcome.difference = largest_difference(expected, model->parameters());
  return outcome;
}

TEST_CASE(
    "sharded stages train as one process, with one gather and one reduction a unit and step") {
  const auto outcomes =
      run_ranks<ShardedOutcome>(4, [](const Rank& self) { return train_sharded(self, {}, false); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.gathers == std::vector<int64_t>{1, 1, 1});
    CHECK(outcome.reductions == std::vector<int64_t>{0, 1, 1});
  }
}

TEST_CASE("sharded stages ask once a step whether ranks keep several graphs") {
  const auto all_reduces = [](int64_t microbatches) {
    return run_ranks<ShardedOutcome>(
               4, [&](const Rank& self) { return train_sharded(self, {}, false, microbatches); })[0]
        .all_reduces;
  };
  CHECK(all_reduces(5) == all_reduces(1));
}

TEST_CASE("sharded stages that free units after forward, and that reduce each micro-batch") {
  const bool reduce_each = GENERATE(false, true);
  const auto outcomes = run_ranks<ShardedOutcome>(
      4, [&](const Rank& self) { return train_sharded(self, true, reduce_each); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.gathers[1] > 4);
    CHECK(outcome.reductions[1] == (reduce_each ? 4 : 1));
  }
}

}  // namespace
