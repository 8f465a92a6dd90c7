// Pipelines of wrappers: replicas of stages, and stages that are sharded.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
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

void check_replicas(const ReplicaPlan& plan, int64_t all_reduces) {
  const auto outcomes =
      run_ranks<ReplicaOutcome>(4, [&](const Rank& self) { return train_replicas(self, plan); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.of_replicas == 0);
    CHECK(outcome.all_reduces == all_reduces);
  }
}

TEST_CASE(
    "replicas of stages stay equal, train as one process, and reduce each bucket once a step") {
  using S = ddp::PipelineSchedule;
  const auto plan = GENERATE(
      ReplicaPlan{S::OneFOneB, 1, 1}, ReplicaPlan{S::OneFOneB, 1, 4}, ReplicaPlan{S::GPipe, 1, 4},
      ReplicaPlan{S::Interleaved, 2, 4});
  CAPTURE(static_cast<int>(plan.schedule), plan.microbatches);
  check_replicas(plan, 2 * plan.chunks);
}

TEST_CASE("reduce_each reduces in each backward, with the same result") {
  ReplicaPlan plan;
  plan.reduce_each = true;
  check_replicas(plan, 2 * plan.microbatches);
}

TEST_CASE("replicas that add up gradients accumulate over several steps") {
  const bool views = GENERATE(false, true);
  const auto differences = run_ranks<double>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const int stage = mesh.rank("pp");
    const Layer layer(stage);
    const ddp::DistributedDataParallel model(
        layer,
        replicas(mesh.group("dp")).reduction(ddp::Reduction::Sum).gradient_as_bucket_view(views));
    ddp::PipelineStage pipeline(
        model, stage, 2, pipeline_loss, ddp::PipelineOptions().process_group(mesh.group("pp")));
    WholeNet whole(2);
    for (int64_t s = 0; s < 3; ++s) {
      for (int64_t r = 0; r < 2; ++r) {
        const auto batch = pipeline_batch(6, 2 * s + r);
        pipeline_loss(whole.forward(batch.input), batch.target).backward();
        if (r != mesh.rank("dp")) continue;
        std::vector<at::Tensor> inputs;
        if (stage == 0) inputs.push_back(batch.input);
        pipeline.step(inputs, stage == 1 ? batch.target : at::Tensor());
      }
    }
    const auto& expected = whole.layers[static_cast<size_t>(stage)]->fc;
    return largest_difference(
        {expected->weight.grad(), expected->bias.grad()},
        {layer->fc->weight.grad(), layer->fc->bias.grad()});
  });
  for (const auto difference : differences) CHECK(difference < 1e-12);
}

TEST_CASE("a stage without a gradient in its last backward still reduces with the other replicas") {
  const auto differences = run_ranks<double>(4, [](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const auto dp = mesh.group("dp");
    const auto options = ddp::PipelineOptions().process_group(mesh.group("pp")).microbatches(2);
    const auto batch = pipeline_batch(4, dp->getRank());
    if (mesh.rank("pp") == 1) {
      // Uses its argument in every other forward only.
      const RunLayer layer(1, [forwards = 0](Layer& own, const at::Tensor& x) mutable {
        return own->forward(++forwards % 2 == 0 ? x.detach() : x);
      });
      ddp::DistributedDataParallel model(layer, replicas(dp));
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

TEST_CASE("a sharded stage whose parameters are all frozen takes part in steps") {
  const int frozen = GENERATE(0, 1);
  const auto differences = run_ranks<double>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const int stage = mesh.rank("pp");
    const auto freeze = [](Layer& layer) {
      for (auto& p : layer->parameters()) p.requires_grad_(false);
    };
    WholeNet whole(2);
    freeze(whole.layers[static_cast<size_t>(frozen)]);
    Layer layer(stage);
    if (stage == frozen) freeze(layer);
    ddp::FullyShardedDataParallel model(
        layer, ddp::FullyShardedOptions().process_group(mesh.group("dp")));
    ddp::PipelineStage pipeline(
        model, stage, 2, pipeline_loss, ddp::PipelineOptions().process_group(mesh.group("pp")));
    train_beside_whole(mesh, pipeline, whole, [](const auto& step) { step(); });
    const ddp::SummonFullParams summoned(*model);
    return largest_difference(
        whole.layers[static_cast<size_t>(stage)]->parameters(), model->parameters());
  });
  for (const auto difference : differences) CHECK(difference < 1e-12);
}

TEST_CASE("sharded replicas evaluate batches of different rows") {
  const auto differences = run_ranks<double>(4, [](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const int stage = mesh.rank("pp");
    // Each forward gathers: replicas need as many.
    const auto options =
        ddp::FullyShardedOptions().process_group(mesh.group("dp")).reshard_after_forward(true);
    const ddp::FullyShardedDataParallel model(Units(2 * stage, options), options);
    ddp::PipelineStage pipeline(
        model, stage, 2, pipeline_loss, ddp::PipelineOptions().process_group(mesh.group("pp")));
    WholeNet whole(4);
    double largest = 0;
    for (const int64_t rows : {3, 1}) {
      const auto batch = pipeline_batch(mesh.rank("dp") == 0 ? rows : 6, rows);
      std::vector<at::Tensor> inputs;
      if (stage == 0) inputs.push_back(batch.input);
      const auto output = pipeline.eval(inputs);
      if (stage == 0) continue;
      const torch::NoGradGuard no_grad;
      largest = std::max(largest, largest_difference({whole.forward(batch.input)}, {output}));
    }
    return largest;
  });
  for (const auto difference : differences) CHECK(difference < 1e-12);
}

/// What this thread does, in its order: 'A' for an all-reduce, 'G' for a gather, 'R' for a
/// reduce-scatter, and what a test adds.
class StepEvents {
 public:
  StepEvents()
      : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&StepEvents::add_collective)
                                               .scopes({at::RecordScope::FUNCTION}))) {}
  ~StepEvents() { at::removeCallback(handle_); }
  StepEvents(const StepEvents&) = delete;
  StepEvents& operator=(const StepEvents&) = delete;

  static std::string& events() {
    thread_local std::string events;
    return events;
  }

 private:
  static std::unique_ptr<at::ObserverContext> add_collective(const at::RecordFunction& call) {
    const std::string name = call.name();
    const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
    if (name.rfind("c10d::", 0) != 0) return nullptr;
    if (has("allreduce_")) events().push_back('A');
    if (has("reduce_scatter")) events().push_back('R');
    if (has("gather")) events().push_back('G');
    return nullptr;
  }
  at::CallbackHandle handle_;
};

/// The events of the last of three steps of two stages and two replicas, by rank.
///
/// \param make_model  of a stage and the replicas' group.
template <typename Make>
std::vector<std::string> events_of_steps(ddp::PipelineSchedule schedule, const Make& make_model) {
  return run_ranks<std::string>(4, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
    const int stage = mesh.rank("pp");
    const StepEvents recorded;
    const auto model = make_model(stage, mesh.group("dp"));
    ddp::PipelineStage pipeline(
        model, stage, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(mesh.group("pp")).schedule(schedule).microbatches(3));
    const auto batch = pipeline_batch(6, self.rank);
    std::vector<at::Tensor> inputs;
    if (stage == 0) inputs.push_back(batch.input);
    for (int s = 0; s < 3; ++s) {  // the first one finds the order of buckets and of units
      recorded.events().clear();
      pipeline.step(inputs, stage == 1 ? batch.target : at::Tensor());
    }
    return recorded.events();
  });
}

TEST_CASE("buckets are reduced in the last backward, each as soon as its gradients are there") {
  using S = ddp::PipelineSchedule;
  const auto schedule = GENERATE(S::OneFOneB, S::GPipe);
  const auto events = events_of_steps(schedule, [](int stage, const ddp::ProcessGroup& dp) {
    const torch::nn::Sequential layers(Layer(2 * stage), Layer(2 * stage + 1));
    for (const auto& p : layers->parameters()) {
      p.register_hook([](const at::Tensor&) { StepEvents::events().push_back('g'); });
    }
    return ddp::DistributedDataParallel<torch::nn::Sequential>(
        layers, replicas(dp).check_inputs(false));
  });
  // Weight and bias of two layers, a bucket each, in three backwards.
  for (const auto& of_rank : events) CHECK(of_rank == "gggggggggAgAgAgA");
}

TEST_CASE("units of a stage are gathered and reduced once a step, while others compute") {
  using S = ddp::PipelineSchedule;
  const auto schedule = GENERATE(S::OneFOneB, S::GPipe);
  const auto events = events_of_steps(schedule, [](int stage, const ddp::ProcessGroup& dp) {
    const auto options = ddp::FullyShardedOptions().process_group(dp);
    torch::nn::Sequential units;
    for (const int64_t k : {0, 1}) {
      const RunLayer layer(2 * stage + k, [](Layer& own, const at::Tensor& x) {
        StepEvents::events().push_back('f');
        const auto y = own->forward(x);
        y.register_hook([](const at::Tensor&) { StepEvents::events().push_back('b'); });
        return y;
      });
      units->push_back(ddp::FullyShardedDataParallel(layer, options));
    }
    return ddp::FullyShardedDataParallel(units, options);
  });
  // The last backward ends with the ranks' notes of what they reduced.
  const std::string first = "GGff", forward = "ff", backward = "bb", last = "bRbRA";
  const bool is_gpipe = schedule == S::GPipe;
  for (size_t rank = 0; rank < 4; ++rank) {
    CAPTURE(rank, is_gpipe);
    const auto expected = is_gpipe   ? first + forward + forward + backward + backward + last
                          : rank < 2 ? first + forward + backward + forward + backward + last
                                     : first + backward + forward + backward + forward + last;
    CHECK(events[rank] == expected);
  }
}

TEST_CASE("a stage that throws ends all ranks of a mesh, with action and coordinate", "[errors]") {
  constexpr int kThrower = 5;
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds(8);
  const auto errors = errors_of_ranks(8, kLongTimeout, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2, 2}, {"pp", "dp", "tp"}, self.group);
    const int stage = mesh.rank("pp");
    // The backward of micro-batch 2 throws.
    const RunLayer layer(0, [&, forwards = 0](Layer& own, const at::Tensor& x) mutable {
      auto y = own->forward(x);
      if (self.rank == kThrower && forwards++ == 2) {
        y.register_hook([](const at::Tensor&) { throw std::runtime_error("boom"); });
      }
      return y;
    });
    ddp::PipelineStage pipeline(
        layer, stage, 2, pipeline_loss, ddp::PipelineOptions().process_group(mesh.group("pp")));
    const auto batch = pipeline_batch(8, 0);
    std::vector<at::Tensor> inputs;
    if (stage == 0) inputs.push_back(batch.input);
    auto sum = torch::ones({1});
    const auto start = Clock::now();
    try {
      for (int s = 0; s < 2; ++s) {
        pipeline.step(inputs, stage == 1 ? batch.target : at::Tensor());
        ddp::all_reduce(sum, c10d::ReduceOp::SUM, mesh.group("tp"));
        ddp::all_reduce(sum, c10d::ReduceOp::SUM, mesh.group("dp"));
      }
    } catch (...) {
      seconds[static_cast<size_t>(self.rank)] =
          std::chrono::duration<double>(Clock::now() - start).count();
      throw;
    }
  });
  CHECK_THAT(
      errors, Each(
                  ContainsText("B2 of stage 1 failed on rank 5 of 8 (pp 1, dp 0, tp 1)") &&
                  ContainsText("boom")));
  CHECK(*std::max_element(seconds.begin(), seconds.end()) < 20);
}

TEST_CASE("a wait of a mesh's pipeline names ranks of the job", "[errors]") {
  const auto errors = errors_of_ranks(
      4, RanksOptions{std::chrono::seconds(4), std::chrono::seconds(30)}, [](const Rank& self) {
        const auto mesh = ddp::init_device_mesh({2, 2}, {"pp", "dp"}, self.group);
        ddp::PipelineStage pipeline(
            Layer(0), mesh.rank("pp"), 2, pipeline_loss,
            ddp::PipelineOptions().process_group(mesh.group("pp")));
        if (self.rank < 3) return self.wait_until_others_end();
        pipeline.step({}, pipeline_batch(8, 0).target);
      });
  CHECK_THAT(
      errors[3], ContainsText("F0 of stage 1, from stage 0 on rank 1 of 4 (pp 0, dp 1) failed on "
                              "rank 3 of 4 (pp 1, dp 1)"));
}

}  // namespace
