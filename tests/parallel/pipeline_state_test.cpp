// The state of a model in stages: whole, and in checkpoints.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/text.h>

#include "parallel/pipeline_net.h"
#include "parallel/tied_net.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

/// The names in the whole network of so many layers.
std::vector<std::string> names_in_whole(int64_t layers) {
  std::vector<std::string> names{"table.weight"};
  for (int64_t k = 0; k < layers; ++k) {
    names.push_back(ddp::str("layer", k, ".fc.weight"));
    names.push_back(ddp::str("layer", k, ".fc.bias"));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::unique_ptr<torch::optim::Optimizer> adam_of(const TiedRun& run) {
  return std::make_unique<torch::optim::AdamW>(
      run.pipeline->parameters(), torch::optim::AdamWOptions(1e-2));
}

void train_state(const TiedRun& run, torch::optim::Optimizer& optimizer, int64_t from, int64_t to) {
  for (int64_t s = from; s < to; ++s) {
    optimizer.zero_grad();
    run.step(pipeline_batch(12, s));
    optimizer.step();
  }
}

ddp::CheckpointerOptions checkpointer_options(const Rank& self) {
  return ddp::CheckpointerOptions().process_group(self.group).background(false);
}

/// The whole network after five steps that begin with a saved state, or the first one; rank 0's.
std::vector<at::Tensor> after_steps(const std::string& folder, const TiedPlan& plan, bool saves) {
  const auto dicts = run_ranks<torch::OrderedDict<std::string, at::Tensor>>(
      plan.pp * plan.dp, [&](const Rank& self) {
        const TiedRun run(self, plan);
        const auto optimizer = adam_of(run);
        ddp::Checkpointer checkpointer(folder, checkpointer_options(self));
        // Of the wrappers in the pipeline, where it has one.
        if (plan.chunks > 1) {
          checkpointer.add("model", *run.pipeline);
        } else {
          checkpointer.add("model", *run.module(0));
        }
        checkpointer.add("optimizer", *optimizer);
        if (saves) {
          train_state(run, *optimizer, 0, 3);
          checkpointer.save(3);
        } else {
          checkpointer.load(3);
        }
        train_state(run, *optimizer, 3, 5);
        return ddp::full_state_dict(*run.pipeline, 0, self.group);
      });
  std::vector<at::Tensor> values;
  for (const auto& name : names_in_whole(4)) values.push_back(dicts[0][name]);
  return values;
}

TEST_CASE("a checkpoint of stages goes on in other stages, and in other wrappers") {
  const TemporaryFolder folder;
  const auto saved = after_steps(folder.path(), {4, 1, 1, TiedWrapper::None}, true);
  for (const auto& plan :
       {TiedPlan{2, 1, 2, TiedWrapper::None}, TiedPlan{4, 1, 1, TiedWrapper::Replicas}}) {
    CAPTURE(plan.pp, plan.chunks);
    CHECK(largest_difference(saved, after_steps(folder.path(), plan, false)) < 1e-12);
  }
}

TEST_CASE("a checkpoint of sharded stages goes on in stages that are not, and the other way") {
  const TemporaryFolder of_shards, of_replicas;
  const TiedPlan shards{2, 2, 2, TiedWrapper::Shards}, replicas{2, 2, 2, TiedWrapper::Replicas};
  const auto expected = after_steps(of_shards.path(), shards, true);
  CHECK(largest_difference(expected, after_steps(of_shards.path(), replicas, false)) < 1e-12);
  CHECK(largest_difference(expected, after_steps(of_replicas.path(), replicas, true)) < 1e-12);
  CHECK(largest_difference(expected, after_steps(of_replicas.path(), shards, false)) < 1e-12);
}

/// A whole network as one module, with the names of the stages.
struct NamedWholeImpl : torch::nn::Module {
  explicit NamedWholeImpl(int64_t layers) : table(register_module("table", Table())) {
    for (int64_t k = 0; k < layers; ++k) {
      this->layers.push_back(register_module(ddp::str("layer", k), Layer(k)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = table->forward(x, false);
    for (auto& layer : layers) y = layer->forward(y);
    return table->forward(y, true);
  }
  Table table;
  std::vector<Layer> layers;
};
TORCH_MODULE(NamedWhole);

TEST_CASE("a checkpoint of stages goes on in one process, and its model in stages again") {
  const TemporaryFolder of_stages, of_whole;
  const auto expected = after_steps(of_stages.path(), {2, 1, 2, TiedWrapper::None}, true);
  const auto values = run_ranks<std::vector<at::Tensor>>(1, [&](const Rank& self) {
    NamedWhole model(4);
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    ddp::Checkpointer checkpointer(of_stages.path(), checkpointer_options(self));
    checkpointer.add("model", model).add("optimizer", optimizer);
    checkpointer.load(3);
    for (int64_t s = 3; s < 5; ++s) {
      const auto batch = pipeline_batch(12, s);
      optimizer.zero_grad();
      pipeline_loss(model->forward(batch.input), batch.target).backward();
      optimizer.step();
    }
    ddp::Checkpointer(of_whole.path(), checkpointer_options(self)).add("model", model).save(5);
    std::vector<at::Tensor> own;
    for (const auto& name : names_in_whole(4)) own.push_back(model->named_parameters()[name]);
    return own;
  })[0];
  CHECK(largest_difference(expected, values) < 1e-12);

  const auto differences = run_ranks<double>(2, [&](const Rank& self) {
    const TiedRun run(self, {2, 1, 2, TiedWrapper::None});
    ddp::Checkpointer checkpointer(of_whole.path(), checkpointer_options(self));
    checkpointer.add("model", *run.pipeline);
    checkpointer.load(5);
    const auto dict = ddp::full_state_dict(*run.pipeline, 1, self.group);
    if (self.rank == 0) return 0.0;
    std::vector<at::Tensor> own;
    for (const auto& name : names_in_whole(4)) own.push_back(dict[name]);
    return largest_difference(values, own);
  });
  CHECK(differences == std::vector<double>{0, 0});
}

/// A stage without parameters that counts its forwards.
struct CounterImpl : torch::nn::Module {
  explicit CounterImpl(const std::string& name) {
    count = register_buffer(name, torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    count += 1;
    return x * 1;
  }
  at::Tensor count;
};
TORCH_MODULE(Counter);

using Named = std::vector<std::pair<std::string, double>>;

/// The dictionary of two stages that count; rank 1's.
Named state_of_counters(const Rank& self, const std::string& name) {
  ddp::PipelineStage pipeline(
      Counter(name), self.rank, 2, pipeline_loss,
      ddp::PipelineOptions().process_group(self.group).microbatches(2));
  const auto batch = pipeline_batch(4, 0);
  pipeline.eval(self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{});
  Named named;
  for (const auto& item : ddp::full_state_dict(pipeline, 1, self.group)) {
    named.emplace_back(item.key(), item.value().item<double>());
  }
  return named;
}

TEST_CASE("buffers of stages without parameters have the modules' names") {
  const auto named = run_ranks<Named>(
      2, [](const Rank& self) { return state_of_counters(self, ddp::str("count", self.rank)); });
  CHECK(named[1] == Named{{"count0", 2}, {"count1", 2}});
}

/// A stage of one layer, or of none.
struct PossiblyIdleImpl : torch::nn::Module {
  PossiblyIdleImpl(int64_t k, bool is_idle) {
    if (!is_idle) layer = register_module(ddp::str("layer", k), Layer(k));
  }
  at::Tensor forward(const at::Tensor& x) { return layer ? layer->forward(x) : x * 2; }
  Layer layer{nullptr};
};
TORCH_MODULE(PossiblyIdle);

/// This rank's values after five steps that begin with a saved state, or the first one.
std::vector<at::Tensor> after_idle_steps(
    const Rank& self, const std::string& folder, int idle, bool saves) {
  PossiblyIdle stage(self.rank, self.rank == idle);
  ddp::PipelineStage pipeline(
      stage, self.rank, self.size, pipeline_loss,
      ddp::PipelineOptions().process_group(self.group).microbatches(2));
  torch::optim::AdamW optimizer(stage->parameters(), torch::optim::AdamWOptions(1e-2));
  ddp::Checkpointer checkpointer(folder, checkpointer_options(self));
  checkpointer.add("model", stage).add("optimizer", optimizer);
  if (!saves) checkpointer.load(3);
  for (int64_t s = saves ? 0 : 3; s < 5; ++s) {
    if (s == 3 && saves) checkpointer.save(3);
    const auto batch = pipeline_batch(4, s);
    optimizer.zero_grad();
    pipeline.step(
        self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        self.rank + 1 == self.size ? batch.target : at::Tensor());
    optimizer.step();
  }
  return stage->parameters();
}

TEST_CASE("a checkpoint of stages of which one has no parameters goes on") {
  const int idle = GENERATE(0, 1, 2);
  const TemporaryFolder folder;
  const auto run = [&](bool saves) {
    return run_ranks<std::vector<at::Tensor>>(
        3, [&](const Rank& self) { return after_idle_steps(self, folder.path(), idle, saves); });
  };
  const auto expected = run(true), values = run(false);
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(expected[rank].size() == (static_cast<int>(rank) == idle ? 0 : 2));
    CHECK(largest_difference(expected[rank], values[rank]) == 0);
  }
}

TEST_CASE("tensors of one name in two stages are refused on every rank", "[errors]") {
  const auto buffers =
      errors_of_ranks(2, [](const Rank& self) { state_of_counters(self, "count"); });
  const TemporaryFolder folder;
  const auto parameters = errors_of_ranks(2, [&](const Rank& self) {
    Layer layer(self.rank);
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss, ddp::PipelineOptions().process_group(self.group));
    ddp::Checkpointer checkpointer(folder.path(), checkpointer_options(self));
    checkpointer.add("model", layer);
    checkpointer.save(1);
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        buffers[rank],
        ContainsText("full_state_dict: expected count in one stage of the pipeline, got it in "
                     "stage 0 on rank 0 and in stage 1 on rank 1 of 2. Name the modules of stages "
                     "by their place in the model, or declare a TiedParameter."));
    CHECK_THAT(
        parameters[rank],
        ContainsText("Checkpointer: expected fc.weight in part \"model\" in one stage of the "
                     "pipeline, got it in stage 0 on rank 0 and in stage 1 on rank 1 of 2."));
  }
}

}  // namespace
