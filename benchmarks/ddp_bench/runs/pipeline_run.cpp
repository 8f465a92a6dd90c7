#include "pipeline_run.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/pipeline.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "benchmarks/ddp_bench/result.h"
#include "beside_one_rank.h"
#include "examples/common/rank_device.h"

namespace ddp_bench {
namespace {

constexpr int64_t kStageWidth = 1024;
constexpr int64_t kLayersOfRank = 2;
constexpr int64_t kRowsOfMicrobatch = 256;
constexpr double kRate = 1e-3;
constexpr double kSleepOfRank = 20;  // ms of a micro-batch's forward through all of a rank's chunks

double sleep_of(int64_t chunks) { return kSleepOfRank / static_cast<double>(chunks); }

void sleep_for(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

/// Sleeps in forward, and twice as long in backward, as a model computes.
class Sleep : public torch::autograd::Function<Sleep> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context, const at::Tensor& x, double ms) {
    context->saved_data["ms"] = ms;
    sleep_for(ms);
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    sleep_for(2 * context->saved_data["ms"].toDouble());
    return {gradients[0], at::Tensor()};
  }
};

/// The layers of a stage, the same wherever they are made. A rank's chunks have as many layers as
/// its only one would have: every schedule trains the same model.
struct StageImpl : torch::nn::Module {
  StageImpl(int64_t stage, int64_t chunks, bool sleeps) : sleep_ms(sleeps ? sleep_of(chunks) : 0) {
    torch::manual_seed(static_cast<uint64_t>(stage) + 1);
    scale = register_parameter("scale", at::ones({1}));
    for (int64_t k = 0; k < (sleeps ? 0 : kLayersOfRank / chunks); ++k) {
      const torch::nn::Linear layer(kStageWidth, kStageWidth);
      linear.push_back(register_module("linear" + std::to_string(k), layer));
    }
  }
  at::Tensor forward(at::Tensor x) {
    x = x * scale;
    for (auto& layer : linear) x = at::gelu(layer->forward(x));
    return sleep_ms > 0 ? Sleep::apply(x, sleep_ms) : x;
  }
  double sleep_ms;
  at::Tensor scale;
  std::vector<torch::nn::Linear> linear;
};
TORCH_MODULE(Stage);

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

class PipelineBenchmark {
 public:
  /// \param sleeps  whether layers sleep, and do not compute.
  PipelineBenchmark(const Options& options, const ddp::ProcessGroup& group, bool sleeps)
      : options_(options),
        group_(group),
        device_(examples::rank_device(options.backend)),
        sleeps_(sleeps),
        chunks_(options.schedule == "interleaved" ? 2 : 1),
        times_(options, group) {
    const int ranks = group->getSize(), rank = group->getRank();
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    const auto rows = sleeps ? options.microbatches : options.microbatches * kRowsOfMicrobatch;
    input_ = at::randn({rows, sleeps ? options.message_kib * 256 : kStageWidth}).to(device_);
    target_ = at::randn_like(input_);
    std::vector<Stage> own;
    for (int64_t stage = 0; stage < chunks_ * ranks; ++stage) {
      if (stage % ranks == rank) own.emplace_back(stage, chunks_, sleeps);
      if (rank == 0 && !sleeps) whole_.emplace_back(stage, chunks_, sleeps);
    }
    for (auto& stage : own) stage->to(device_);
    for (auto& stage : whole_) stage->to(device_);
    pipeline_ = std::make_unique<ddp::PipelineStage<Stage>>(
        own, rank, ranks, loss_of,
        ddp::PipelineOptions()
            .process_group(group)
            .schedule(schedule())
            .microbatches(options.microbatches));
    optimizer_ = std::make_unique<torch::optim::SGD>(pipeline_->parameters(), kRate);
    std::vector<at::Tensor> parameters;
    for (const auto& stage : whole_) {
      for (const auto& p : stage->parameters()) parameters.push_back(p);
    }
    if (!whole_.empty()) whole_optimizer_ = std::make_unique<torch::optim::SGD>(parameters, kRate);
  }

  void run() {
    times_.run([&] { step_whole(); }, [&] { step_pipeline(); });
    stats_ = ddp::all_gather_stats(pipeline_->stats(), group_);
  }

  const ddp::PipelineStats& stats() const { return stats_; }

  std::vector<PipelineResult> results() const {
    PipelineResult pipeline;
    pipeline.mode = sleeps_ ? "sleeping" : "pipeline";
    pipeline.schedule = options_.schedule;
    pipeline.backend = group_->getBackend(device_.type())->getBackendName();
    pipeline.world = group_->getSize();
    pipeline.microbatches = options_.microbatches;
    pipeline.step_ms = times_.together_ms();
    pipeline.bubble = stats_.bubble();
    const auto ranks = static_cast<double>(group_->getSize());
    const auto actions = static_cast<double>(chunks_ * options_.microbatches);
    pipeline.ideal_bubble = (ranks - 1) / (actions + ranks - 1);
    const auto alone_ms = sleeps_ ? ranks * actions * 3 * sleep_of(chunks_) : times_.alone_ms();
    pipeline.ideal_ms = alone_ms / ranks / (1 - pipeline.ideal_bubble);
    if (sleeps_) return {pipeline};
    auto whole = pipeline;
    whole.mode = "one_rank";
    whole.step_ms = alone_ms;
    pipeline.speedup = times_.speedup();
    return {whole, pipeline};
  }

  /// The relative difference of the losses of the last steps. Collective.
  double difference() const {
    auto losses = at::zeros({2}, at::dtype(at::kDouble).device(device_));
    losses[0] = whole_loss_;
    losses[1] = loss_;
    ddp::all_reduce(losses, c10d::ReduceOp::SUM, group_);
    const auto whole = losses[0].item<double>();
    return std::abs(losses[1].item<double>() - whole) / whole;
  }

 private:
  ddp::PipelineSchedule schedule() const {
    if (options_.schedule == "gpipe") return ddp::PipelineSchedule::GPipe;
    if (options_.schedule == "1f1b") return ddp::PipelineSchedule::OneFOneB;
    return ddp::PipelineSchedule::Interleaved;  // "eager": of one stage a rank
  }

  void step_whole() {
    if (whole_.empty()) return;
    whole_optimizer_->zero_grad();
    auto x = input_;
    for (auto& stage : whole_) x = stage->forward(x);
    const auto loss = loss_of(x, target_);
    loss.backward();
    whole_optimizer_->step();
    whole_loss_ = loss.item<double>();
  }

  void step_pipeline() {
    const int rank = group_->getRank();
    const bool is_last = rank + 1 == group_->getSize();
    optimizer_->zero_grad();
    const auto result = pipeline_->step(
        rank == 0 ? std::vector<at::Tensor>{input_} : std::vector<at::Tensor>{},
        is_last ? target_ : at::Tensor());
    optimizer_->step();
    loss_ = is_last ? at::stack(result.losses).mean().item<double>() : 0;
  }

  const Options& options_;
  ddp::ProcessGroup group_;
  c10::Device device_;
  const bool sleeps_;
  const int64_t chunks_;
  at::Tensor input_, target_;
  std::vector<Stage> whole_;  // on rank 0
  std::unique_ptr<ddp::PipelineStage<Stage>> pipeline_;
  std::unique_ptr<torch::optim::SGD> optimizer_, whole_optimizer_;
  double loss_ = 0, whole_loss_ = 0;
  BesideOneRank times_;
  ddp::PipelineStats stats_;
};

}  // namespace

void run_pipeline(const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  constexpr double kMostDifference = 1e-5;
  at::set_num_threads(options.threads);
  const auto measure = [&](bool sleeps) {
    auto benchmark = std::make_unique<PipelineBenchmark>(options, group, sleeps);
    benchmark->run();
    if (group->getRank() == 0) {
      for (const auto& result : benchmark->results()) out << to_json(result) << std::endl;
    }
    return benchmark;
  };
  const auto computing = options.sleep ? nullptr : measure(/*sleeps=*/false);
  const auto sleeping = measure(/*sleeps=*/true);
  if (group->getRank() == 0 && !options.timeline.empty()) {
    ddp::write_trace(options.timeline, sleeping->stats());
  }
  const double difference = computing ? computing->difference() : 0;
  TORCH_CHECK(
      difference <= kMostDifference, "--pp: expected the loss of one rank to ", kMostDifference,
      ", got a difference of ", difference, " on rank ", group->getRank(), " of ", group->getSize(),
      ".");
}

}  // namespace ddp_bench
