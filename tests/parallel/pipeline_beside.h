// A pipeline beside one process with the whole model and the whole batch, in double.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"

namespace ddp::testing {

inline constexpr auto kGPipe = PipelineSchedule::GPipe;
inline constexpr auto kOneFOneB = PipelineSchedule::OneFOneB;
inline constexpr auto kInterleaved = PipelineSchedule::Interleaved;

inline PipelineOptions options_of(
    const Rank& self, PipelineSchedule schedule, int64_t microbatches) {
  return PipelineOptions().process_group(self.group).schedule(schedule).microbatches(microbatches);
}

struct Plan {
  PipelineSchedule schedule = kOneFOneB;
  int64_t chunks = 1;
  int64_t microbatches = 1;
};

/// What a rank trains: its layers of the whole network, which it trains beside them.
struct Beside {
  Beside(const Rank& self, const Plan& plan)
      : self(self),
        whole(self.size * plan.chunks),
        pipeline(
            layers(self, plan.chunks), pipeline_loss,
            options_of(self, plan.schedule, plan.microbatches)),
        whole_optimizer(pipeline_optimizer(whole.parameters())),
        optimizer(pipeline_optimizer(pipeline.parameters())) {}

  static std::vector<Layer> layers(const Rank& self, int64_t chunks) {
    std::vector<Layer> layers;
    for (int64_t c = 0; c < chunks; ++c) layers.emplace_back(c * self.size + self.rank);
    return layers;
  }

  bool is_first() const { return self.rank == 0; }
  bool is_last() const { return self.rank == self.size - 1; }

  std::vector<at::Tensor> own_of_whole() const {
    std::vector<at::Tensor> own;
    for (size_t k = static_cast<size_t>(self.rank); k < whole.layers.size();
         k += static_cast<size_t>(self.size)) {
      for (const auto& p : whole.layers[k]->parameters()) own.push_back(p);
    }
    return own;
  }

  PipelineResult step(const PipelineBatch& batch) {
    return pipeline.step(
        is_first() ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        is_last() ? batch.target : at::Tensor());
  }

  /// Runs a step of both; returns how much they differ.
  double train(int64_t rows, int64_t seed) {
    const auto batch = pipeline_batch(rows, seed);
    whole_optimizer.zero_grad();
    optimizer.zero_grad();
    const auto output = whole.forward(batch.input);
    const auto loss = pipeline_loss(output, batch.target);
    loss.backward();
    const auto result = step(batch);
    whole_optimizer.step();
    optimizer.step();
    double difference = largest_difference(own_of_whole(), pipeline.parameters());
    if (is_last()) {
      auto mean = at::zeros_like(loss);
      const auto parts = batch.target.tensor_split(static_cast<int64_t>(result.losses.size()));
      for (size_t i = 0; i < parts.size(); ++i) {
        mean += result.losses[i] * parts[i].size(0) / static_cast<double>(rows);
      }
      difference = std::max(difference, largest_difference({loss, output}, {mean, result.output}));
    } else if (result.output.defined() || !result.losses.empty()) {
      difference = 1e300;
    }
    return difference;
  }

  const Rank& self;
  WholeNet whole;
  PipelineStage<Layer> pipeline;
  torch::optim::SGD whole_optimizer, optimizer;
};

/// Runs `body` on each rank; returns the largest result.
inline double largest_of_ranks(int ranks, const std::function<double(const Rank&)>& body) {
  const auto results = run_ranks<double>(ranks, body);
  return *std::max_element(results.begin(), results.end());
}

}  // namespace ddp::testing
