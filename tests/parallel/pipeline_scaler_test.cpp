// GradScalers of pipelines: over stages, and over a mesh of stages, replicas and cut layers.
#include <cstdint>
#include <limits>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

#include "parallel/pipeline_net.h"
#include "support/ranks.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

TEST_CASE("a GradScaler scales losses of a pipeline, and all stages skip a step together") {
  const int bad_stage = GENERATE(-1, 0, 1);
  CAPTURE(bad_stage);
  struct Seen {
    bool stepped;
    double difference, scale;
  };
  const auto seen = run_ranks<Seen>(2, [&](const Rank& self) {
    ddp::GradScaler scaler(
        ddp::GradScalerOptions().init_scale(1024).found_inf_groups({self.group}));
    Layer layer(self.rank);
    WholeNet whole(2);
    ddp::PipelineStage pipeline(
        layer, self.rank, 2, pipeline_loss,
        ddp::PipelineOptions().process_group(self.group).scale_loss([&](const at::Tensor& loss) {
          return scaler.scale(loss);
        }));
    auto optimizer = pipeline_optimizer(pipeline.parameters());
    auto whole_optimizer = pipeline_optimizer(whole.parameters());
    const auto batch = pipeline_batch(8, 0);
    if (self.rank == 0) pipeline.step({batch.input}, {});
    if (self.rank == 1) pipeline.step({}, batch.target);
    if (self.rank == bad_stage) {
      layer->fc->bias.mutable_grad()[0] = std::numeric_limits<double>::infinity();
    }
    if (bad_stage < 0) {
      pipeline_loss(whole.forward(batch.input), batch.target).backward();
      whole_optimizer.step();
    }
    const bool stepped = scaler.step(optimizer);
    scaler.update();
    const auto& expected = whole.layers[static_cast<size_t>(self.rank)];
    return Seen{
        stepped, largest_difference(expected->parameters(), layer->parameters()),
        scaler.get_scale()};
  });
  for (const auto& [stepped, difference, scale] : seen) {
    CHECK(stepped == (bad_stage < 0));
    CHECK(difference < 1e-9);
    CHECK(scale == (bad_stage < 0 ? 1024 : 512));
  }
}

/// Two layers that are cut over `tp`, with the same values whatever the stage's rank.
struct CutStageImpl : torch::nn::Module {
  static constexpr int64_t kHidden = 6;

  CutStageImpl(int64_t stage, const ddp::ProcessGroup& tp) {
    torch::nn::Linear one(kPipelineWidth, kHidden), two(kHidden, kPipelineWidth);
    draw_parameters(*one, static_cast<uint64_t>(2 * stage + 1));
    draw_parameters(*two, static_cast<uint64_t>(2 * stage + 2));
    up = register_module(
        "up", ddp::ColumnParallelLinear(
                  ddp::ColumnParallelLinearOptions(kPipelineWidth, kHidden).process_group(tp),
                  one->weight, one->bias));
    down = register_module(
        "down", ddp::RowParallelLinear(
                    ddp::RowParallelLinearOptions(kHidden, kPipelineWidth).process_group(tp),
                    two->weight, two->bias));
    up->bias.register_hook([this](const at::Tensor& gradient) {
      const auto infinity = std::numeric_limits<double>::infinity();
      return overflows ? at::full_like(gradient, infinity) : gradient;
    });
  }
  at::Tensor forward(const at::Tensor& x) { return x + down->forward(torch::tanh(up->forward(x))); }
  ddp::ColumnParallelLinear up{nullptr};
  ddp::RowParallelLinear down{nullptr};
  bool overflows = false;  // in backward, on this rank
};
TORCH_MODULE(CutStage);

/// A rank of a mesh of 2 stages, 2 replicas and layers that are cut in 2.
struct MeshRun {
  MeshRun(const ddp::DeviceMesh& mesh, ddp::PipelineOptions options)
      : mesh(mesh),
        stage(mesh.rank("pp"), mesh.group("tp")),
        model(stage, ddp::DistributedDataParallelOptions().process_group(mesh.group("dp"))),
        pipeline(
            model, mesh.rank("pp"), 2, pipeline_loss,
            options.process_group(mesh.group("pp")).microbatches(2)),
        optimizer(pipeline_optimizer(pipeline.parameters())) {}

  void backward(int64_t step) {
    const auto batch = pipeline_batch(8, step);
    const auto own = [&](const at::Tensor& t) {
      return t.chunk(2)[static_cast<size_t>(mesh.rank("dp"))];
    };
    optimizer.zero_grad();
    if (mesh.rank("pp") == 0) pipeline.step({own(batch.input)}, {});
    if (mesh.rank("pp") == 1) pipeline.step({}, own(batch.target));
  }

  ddp::DeviceMesh mesh;
  CutStage stage;
  ddp::DistributedDataParallel<CutStage> model;
  ddp::PipelineStage<ddp::DistributedDataParallel<CutStage>> pipeline;
  torch::optim::SGD optimizer;
};

TEST_CASE("all ranks of a mesh skip a step whose gradients overflow on one of them") {
  // By step, the rank on which they do. Rank 5 is pp 1, dp 0, tp 1, and rank 2 is pp 0, dp 1, tp 0.
  const std::vector<int> overflows_on{-1, 5, -1, 2, -1};
  struct Seen {
    std::vector<bool> stepped;
    double scale, moved, difference;
    bool equal_over_dp;
  };
  const auto seen = run_ranks<Seen>(8, kLongTimeout, [&](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2, 2}, {"pp", "dp", "tp"}, self.group);
    ddp::GradScaler scaler(ddp::GradScalerOptions().init_scale(1024).found_inf_groups(
        {mesh.group("pp"), mesh.group("tp")}));
    MeshRun scaled(mesh, ddp::PipelineOptions().scale_loss([&](const at::Tensor& loss) {
      return scaler.scale(loss);
    }));
    MeshRun plain(mesh, {});
    const auto start = copies_of(plain.stage->parameters());
    std::vector<bool> stepped;
    for (size_t s = 0; s < overflows_on.size(); ++s) {
      scaled.stage->overflows = overflows_on[s] == self.rank;
      scaled.backward(static_cast<int64_t>(s));
      stepped.push_back(scaler.step(scaled.optimizer));
      scaler.update();
      if (overflows_on[s] >= 0) continue;
      plain.backward(static_cast<int64_t>(s));
      plain.optimizer.step();
    }
    const auto trained = plain.stage->parameters();
    return Seen{
        stepped, scaler.get_scale(), largest_difference(start, trained),
        largest_difference(trained, scaled.stage->parameters()),
        ddp::replicas_equal(*scaled.stage, mesh.group("dp"))};
  });
  for (const auto& of_rank : seen) {
    CHECK(of_rank.stepped == std::vector<bool>{true, false, true, false, true});
    CHECK(of_rank.scale == 256);
    CHECK(of_rank.moved > 1e-3);
    CHECK(of_rank.difference < 1e-12);
    CHECK(of_rank.equal_over_dp);
  }
}

}  // namespace
