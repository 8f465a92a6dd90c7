// Pipelines whose first and last stage share a parameter; norms over all stages.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "parallel/pipeline_net.h"
#include "parallel/tied_net.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

constexpr double kMostNorm = 0.05;

/// How the tied runs differ from one process.
struct TiedOutcome {
  double difference = 0;
  double norms = 0;
  double of_copies = 0;  // of the table, between the stages
};

/// Clips the pipeline, or the module in it; with the mesh, or with its groups.
double clip(const TiedRun& run, int64_t step) {
  const auto& pipeline = static_cast<const torch::nn::Module&>(*run.pipeline);
  if (run.plan.chunks > 1 || step == 0) return ddp::clip_grad_norm_(pipeline, kMostNorm, run.mesh);
  if (step == 1) return ddp::clip_grad_norm_(*run.module(0), kMostNorm, run.mesh);
  return ddp::clip_grad_norm_(*run.module(0), kMostNorm, 2.0, {run.mesh.group("pp")});
}

/// Three steps, of which the second adds to the gradients of the first.
TiedOutcome train_tied(const Rank& self, const TiedPlan& plan) {
  TiedRun run(self, plan);
  auto optimizer = pipeline_optimizer(run.pipeline->parameters());
  WholeTied whole(run.stages());
  auto whole_optimizer = pipeline_optimizer(whole.parameters());
  TiedOutcome outcome;
  for (int64_t s = 0; s < 3; ++s) {
    const auto batch = pipeline_batch(12, s);
    if (s != 1) optimizer.zero_grad();
    if (s != 1) whole_optimizer.zero_grad();
    pipeline_loss(whole.forward(batch.input), batch.target).backward();
    run.step(batch);
    const auto expected = torch::nn::utils::clip_grad_norm_(whole.parameters(), kMostNorm);
    const auto norm = clip(run, s);
    outcome.norms = std::max(outcome.norms, std::abs(norm - expected));
    optimizer.step();
    whole_optimizer.step();
  }
  outcome.difference = run.difference_from(whole);
  if (run.ends) {
    auto sum = run.table.detach().clone();
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, run.ends);
    outcome.of_copies = (sum - 2 * run.table.detach()).abs().max().item<double>();
  }
  return outcome;
}

void check_tied(const TiedPlan& plan) {
  CAPTURE(plan.pp, plan.dp, plan.chunks, static_cast<int>(plan.wrapper));
  const auto outcomes = run_ranks<TiedOutcome>(
      plan.pp * plan.dp, [&](const Rank& self) { return train_tied(self, plan); });
  for (const auto& outcome : outcomes) {
    CHECK(outcome.difference < 1e-12);
    CHECK(outcome.norms < 1e-12);
    CHECK(outcome.of_copies == 0);
  }
}

TEST_CASE("a tied parameter trains as one, and counts once in the norm of all stages") {
  check_tied(GENERATE(
      TiedPlan{3, 1, 1, TiedWrapper::None}, TiedPlan{2, 2, 1, TiedWrapper::Replicas},
      TiedPlan{2, 2, 1, TiedWrapper::Shards}, TiedPlan{2, 1, 2, TiedWrapper::None}));
}

TEST_CASE("copies of a tied parameter begin with the first stage's values") {
  const auto differences = run_ranks<double>(2, [](const Rank& self) {
    const Layer layer(self.rank);  // each layer draws others
    const ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(self.group).tied({{layer->fc->weight, self.group}}));
    return largest_difference({Layer(0)->fc->weight}, {layer->fc->weight});
  });
  for (const auto difference : differences) CHECK(difference == 0);
}

TEST_CASE("tied parameters that do not fit together are refused on every rank", "[errors]") {
  const auto errors_of = [](const auto& tied_of) {
    return errors_of_ranks(2, [&](const Rank& self) {
      Layer layer(self.rank);
      ddp::PipelineStage(
          layer, self.rank, 2, pipeline_loss,
          ddp::PipelineOptions().process_group(self.group).tied(tied_of(self, layer)));
    });
  };
  using Tied = std::vector<ddp::TiedParameter>;
  const auto alone = errors_of([](const Rank& self, Layer& layer) {
    return self.rank == 1 ? Tied{} : Tied{{layer->fc->weight, self.group}};
  });
  const auto unlike = errors_of([](const Rank& self, Layer& layer) {
    return Tied{{self.rank == 1 ? layer->fc->bias : layer->fc->weight, self.group}};
  });
  const auto other = errors_of([](const Rank& self, Layer& layer) {
    return Tied{{self.rank == 1 ? torch::ones({5, 5}) : layer->fc->weight, self.group}};
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(
        alone[rank],
        ContainsText("PipelineStage: expected a TiedParameter on all 2 ranks of its group, got it "
                     "on rank 0 of 2 alone."));
    CHECK_THAT(
        unlike[rank],
        ContainsText("PipelineStage: expected copies of a TiedParameter with one shape and dtype, "
                     "got [5, 5] Double on rank 0 and [5] Double on rank 1 of 2."));
    CHECK_THAT(
        other[rank], ContainsText("PipelineStage: expected a TiedParameter with a parameter of the "
                                  "stage's module and the group of the ranks that have it, got "
                                  "another tensor on rank 1 of 2."));
  }
}

TEST_CASE("a tied parameter that one stage alone freezes is refused on all", "[errors]") {
  const bool is_late = GENERATE(true, false);
  const auto errors = run_ranks<TimedError>(2, kLongTimeout, [&](const Rank& self) {
    Layer layer(self.rank);
    const auto freeze = [&] { layer->fc->weight.requires_grad_(self.rank == 0); };
    if (!is_late) freeze();
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(self.group).tied({{layer->fc->weight, self.group}}));
    if (is_late) freeze();
    const auto batch = pipeline_batch(4, 0);
    return timed_error_of([&] {
      pipeline.step(
          self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
          self.rank == 1 ? batch.target : at::Tensor());
    });
  });
  for (const auto& [error, seconds] : errors) {
    CHECK_THAT(error, ContainsText("TiedParameter to require a gradient, or none, got 1 that do"));
    CHECK(seconds < 10);
  }
}

TEST_CASE("a tied parameter may be frozen on all stages") {
  const auto values = run_ranks<int>(2, [](const Rank& self) {
    Layer layer(self.rank);
    layer->fc->weight.requires_grad_(false);
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(self.group).tied({{layer->fc->weight, self.group}}));
    const auto batch = pipeline_batch(4, 0);
    pipeline.step(
        self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        self.rank == 1 ? batch.target : at::Tensor());
    TORCH_CHECK(!layer->fc->weight.grad().defined() && layer->fc->bias.grad().defined());
    return 0;
  });
  CHECK(values.size() == 2);
}

TEST_CASE("a stage may be destroyed in its own step") {
  const auto losses = run_ranks<double>(2, [](const Rank& self) {
    using Stage = ddp::PipelineStage<std::shared_ptr<LayerImpl>>;
    std::unique_ptr<Stage> pipeline;
    const auto layer = std::make_shared<LayerImpl>(self.rank);
    pipeline = std::make_unique<Stage>(
        layer, self.rank, 2,
        [&](const at::Tensor& output, const at::Tensor& target) {
          pipeline.reset();
          return pipeline_loss(output, target);
        },
        ddp::PipelineOptions().process_group(self.group).microbatches(2));
    const auto batch = pipeline_batch(4, 0);
    const auto result = pipeline->step(
        self.rank == 0 ? std::vector<at::Tensor>{batch.input} : std::vector<at::Tensor>{},
        self.rank == 1 ? batch.target : at::Tensor());
    TORCH_CHECK(layer->fc->weight.grad().defined());
    return self.rank == 0 ? 1.0 : result.losses.at(1).item<double>();
  });
  for (const auto loss : losses) CHECK(loss > 0);
}

TEST_CASE("clipping a stage without the other stages is refused", "[errors]") {
  const auto errors = run_ranks<std::string>(2, [](const Rank& self) {
    Layer layer(self.rank);
    const auto error = [&] {
      return error_of<c10::ValueError>([&] { ddp::clip_grad_norm_(*layer, 1.0); });
    };
    {
      ddp::PipelineStage pipeline(
          layer, self.rank, 2, pipeline_loss, ddp::PipelineOptions().process_group(self.group));
      const auto text = error();
      if (text.find("clip_grad_norm_: expected the ranks of the pipeline") == std::string::npos) {
        return "in a pipeline: " + text;
      }
    }
    return error();
  });
  CHECK(errors == std::vector<std::string>(2));
}

}  // namespace
