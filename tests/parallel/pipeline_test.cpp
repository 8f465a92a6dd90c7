// Pipelines beside one process with the whole model and the whole batch, in double.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_beside.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

TEST_CASE("a pipeline trains as one process, whatever the schedule and the micro-batches") {
  const int ranks = GENERATE(1, 2, 3, 4);
  CAPTURE(ranks);
  const auto difference = largest_of_ranks(ranks, [](const Rank& self) {
    double largest = 0;
    for (const auto& [schedule, chunks] : std::vector<std::pair<ddp::PipelineSchedule, int64_t>>{
             {kGPipe, 1}, {kOneFOneB, 1}, {kInterleaved, 2}}) {
      for (int64_t microbatches = 1; microbatches <= 8; ++microbatches) {
        Beside run(self, {schedule, chunks, microbatches});
        // Rows that no number of micro-batches divides, and others in the next step.
        for (int64_t s = 0; s < 2; ++s) {
          largest = std::max(largest, run.train(2 * microbatches + s, s));
        }
      }
    }
    return largest;
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("a pipeline of one rank with several chunks") {
  const auto [schedule, chunks] = GENERATE(
      std::pair<ddp::PipelineSchedule, int64_t>{kGPipe, 3},
      std::pair<ddp::PipelineSchedule, int64_t>{kInterleaved, 3});
  const auto difference = largest_of_ranks(1, [&, s = schedule, c = chunks](const Rank& self) {
    Beside run(self, {s, c, 3});
    return std::max(run.train(7, 0), run.train(8, 1));
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("evaluation runs forwards, of any number of rows, and leaves gradients alone") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    Beside run(self, {kInterleaved, 2, 4});
    double largest = run.train(9, 0);
    const auto gradients = [&] {
      std::vector<at::Tensor> all;
      for (const auto& p : run.pipeline.parameters()) all.push_back(p.grad());
      return copies_of(all);
    };
    const auto before = gradients();
    for (const int64_t rows : {8, 3, 1}) {
      const auto batch = pipeline_batch(rows, rows);
      const auto output = run.pipeline.eval(
          run.is_first() ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{});
      if (run.is_last() != output.defined() || (output.defined() && output.requires_grad())) {
        return 1e300;
      }
      if (output.defined()) {
        const torch::NoGradGuard no_grad;
        largest =
            std::max(largest, ddp::testing::difference(run.whole.forward(batch.input), output));
      }
    }
    return std::max({largest, largest_difference(before, gradients()), run.train(8, 1)});
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("evaluation builds no graphs") {
  const auto graphs = run_ranks<int>(2, [](const Rank& self) -> int {
    bool builds_graph = false;
    const RunLayer layer(self.rank, [&](Layer& own, const at::Tensor& x) {
      builds_graph = builds_graph || torch::GradMode::is_enabled() || x.requires_grad();
      return own->forward(x);
    });
    ddp::PipelineStage pipeline(layer, self.rank, 2, pipeline_loss, options_of(self, kOneFOneB, 2));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(pipeline_batch(4, 0).input);
    pipeline.eval(inputs);
    return builds_graph;
  });
  CHECK(graphs == std::vector<int>{0, 0});
}

TEST_CASE("gradients of several steps add up, are scaled by scale_loss, and reach the inputs") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    WholeNet whole(2);
    Layer layer(self.rank);
    const auto scale = [](const at::Tensor& loss) { return loss * 8; };
    ddp::PipelineStage pipeline(
        layer, self.rank, self.size, pipeline_loss,
        options_of(self, kOneFOneB, 3).scale_loss(scale));
    double largest = 0;
    for (int64_t s = 0; s < 2; ++s) {
      const auto batch = pipeline_batch(7 + s, s);
      // The second input has a graph, through which backward may go once.
      auto leaf = batch.input.clone().requires_grad_();
      auto whole_leaf = batch.input.clone().requires_grad_();
      const auto used = [&](const at::Tensor& t) { return s == 0 ? t : t.exp(); };
      const auto loss = pipeline_loss(whole.forward(used(whole_leaf)), batch.target);
      (8 * loss).backward();
      std::vector<at::Tensor> inputs;
      if (self.rank == 0) inputs.push_back(used(leaf));
      const auto result = pipeline.step(inputs, self.rank == 1 ? batch.target : at::Tensor());
      if (self.rank == 0)
        largest = std::max(largest, largest_difference({whole_leaf.grad()}, {leaf.grad()}));
    }
    const auto expected = whole.layers[static_cast<size_t>(self.rank)]->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(
          largest, largest_difference({expected[i].grad()}, {layer->parameters()[i].grad()}));
    }
    return largest;
  });
  CHECK(difference < 1e-11);
}

TEST_CASE("scale_grads(false) leaves the loss function's scale") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    WholeNet whole(2);
    const auto batch = pipeline_batch(7, 0);
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
      return (output - target).pow(2).sum() / 7;
    };
    loss(whole.forward(batch.input), batch.target).backward();
    Layer layer(self.rank);
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, loss, options_of(self, kGPipe, 3).scale_grads(false));
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)]->fc->weight;
    return largest_difference({expected.grad()}, {layer->fc->weight.grad()});
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("frozen stages") {
  const int64_t frozen = GENERATE(0, 1);
  const auto difference = largest_of_ranks(3, [&](const Rank& self) {
    const auto batch = pipeline_batch(7, 0);
    WholeNet whole(3);
    const auto freeze = [](Layer& layer) {
      for (auto& p : layer->parameters()) p.requires_grad_(false);
    };
    freeze(whole.layers[static_cast<size_t>(frozen)]);
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    Layer layer(self.rank);
    if (self.rank == frozen) freeze(layer);
    ddp::PipelineStage pipeline(layer, self.rank, 3, pipeline_loss, options_of(self, kOneFOneB, 3));
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(batch.input);
    pipeline.step(inputs, self.rank == 2 ? batch.target : at::Tensor());
    const auto& own = layer->fc->weight.grad();
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)]->fc->weight.grad();
    if (own.defined() != expected.defined()) return 1e300;
    return own.defined() ? largest_difference({expected}, {own}) : 0;
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("modules may move after a pipeline of them is made") {
  const auto difference = largest_of_ranks(2, [](const Rank& self) {
    const auto batch = pipeline_batch(8, 0);
    WholeNet whole(2);
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    Layer layer(self.rank);
    const auto elsewhere = std::make_shared<torch::nn::Module>();
    elsewhere->register_parameter("weight", torch::ones({1}, at::kMeta));
    layer->replace_module("fc", elsewhere);
    ddp::PipelineStage pipeline(layer, self.rank, 2, pipeline_loss, options_of(self, kOneFOneB, 2));
    layer->replace_module("fc", layer->fc.ptr());
    std::vector<at::Tensor> inputs;
    if (self.rank == 0) inputs.push_back(batch.input);
    pipeline.step(inputs, self.rank == 1 ? batch.target : at::Tensor());
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)]->fc->weight;
    return largest_difference({expected.grad()}, {layer->fc->weight.grad()});
  });
  CHECK(difference < 1e-12);
}

TEST_CASE("a Sequential is a stage; layouts have the names of its module") {
  struct Seen {
    double difference;
    std::vector<std::string> names;
  };
  const auto seen = run_ranks<Seen>(2, [](const Rank& self) {
    const auto batch = pipeline_batch(6, 0);
    WholeNet whole(4);
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    const auto of = [&](int64_t k) { return Layer(2 * self.rank + k); };
    torch::nn::Sequential layers(of(0), of(1));
    ddp::PipelineStage pipeline(
        layers, self.rank, 2, pipeline_loss, options_of(self, kOneFOneB, 3));
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    Seen seen{0, {}};
    for (const auto& layout : ddp::layouts_of(pipeline)) seen.names.push_back(layout.name);
    for (size_t k = 0; k < 2; ++k) {
      const auto& expected = whole.layers[static_cast<size_t>(2 * self.rank) + k]->fc->weight;
      seen.difference = std::max(
          seen.difference,
          largest_difference({expected.grad()}, {layers[k]->as<Layer>()->fc->weight.grad()}));
    }
    return seen;
  });
  for (const auto& [difference, names] : seen) {
    CHECK(difference < 1e-12);
    CHECK(
        names == std::vector<std::string>{"0.fc.weight", "0.fc.bias", "1.fc.weight", "1.fc.bias"});
  }
}

}  // namespace
