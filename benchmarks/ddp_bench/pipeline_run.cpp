#include "pipeline_run.h"

#include <chrono>
#include <cmath>
#include <functional>
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

#include "benchmarks/ddp_bench/engines/engine.h"
#include "examples/common/rank_device.h"
#include "result.h"
#include "statistics.h"

namespace ddp_bench {
namespace {

constexpr int64_t kStageWidth = 1024;
constexpr int64_t kLayersOfStage = 2;
constexpr int64_t kRowsOfMicrobatch = 256;
constexpr double kRate = 1e-3;
// A backward takes twice a forward, as in a model.
constexpr std::chrono::milliseconds kSleep{20};

/// Sleeps in forward, and twice as long in backward.
class Sleep : public torch::autograd::Function<Sleep> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    std::this_thread::sleep_for(kSleep);
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/, torch::autograd::variable_list gradients) {
    std::this_thread::sleep_for(2 * kSleep);
    return gradients;
  }
};

/// The layers of a stage, the same wherever they are made.
struct StageImpl : torch::nn::Module {
  StageImpl(int64_t stage, bool sleeps) : sleeps(sleeps) {
    torch::manual_seed(static_cast<uint64_t>(stage) + 1);
    scale = register_parameter("scale", at::ones({1}));
    for (int64_t k = 0; k < (sleeps ? 0 : kLayersOfStage); ++k) {
      const torch::nn::Linear layer(kStageWidth, kStageWidth);
      linear.push_back(register_module("linear" + std::to_string(k), layer));
    }
  }
  at::Tensor forward(at::Tensor x) {
    x = x * scale;
    for (auto& layer : linear) x = at::gelu(layer->forward(x));
    return sleeps ? Sleep::apply(x) : x;
  }
  bool sleeps;
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
        chunks_(options.schedule == "interleaved" ? 2 : 1) {
    const int ranks = group->getSize(), rank = group->getRank();
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    const auto rows = sleeps ? options.microbatches : options.microbatches * kRowsOfMicrobatch;
    input_ = at::randn({rows, sleeps ? options.message_kib * 256 : kStageWidth}).to(device_);
    target_ = at::randn_like(input_);
    std::vector<Stage> own;
    for (int64_t stage = 0; stage < chunks_ * ranks; ++stage) {
      if (stage % ranks == rank) own.emplace_back(stage, sleeps);
      if (rank == 0 && !sleeps) whole_.emplace_back(stage, sleeps);
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
    take_turn(whole_ms_, options_.warmup, [&] { step_whole(); });
    take_turn(pipeline_ms_, options_.warmup, [&] { step_pipeline(); });
    whole_ms_ = {};
    pipeline_ms_ = {};
    for (int round = 0; round < options_.rounds; ++round) {
      const bool whole_first = round % 2 == 0;
      if (whole_first) take_turn(whole_ms_, options_.iters, [&] { step_whole(); });
      take_turn(pipeline_ms_, options_.iters, [&] { step_pipeline(); });
      if (!whole_first) take_turn(whole_ms_, options_.iters, [&] { step_whole(); });
    }
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
    pipeline.step_ms = quantile(pipeline_ms_.of_steps, 0.5);
    pipeline.bubble = stats_.bubble();
    const auto after = static_cast<double>(group_->getSize() - 1);
    const auto all = static_cast<double>(chunks_ * options_.microbatches) + after;
    pipeline.ideal_bubble = after / all;
    if (sleeps_) return {pipeline};
    auto whole = pipeline;
    whole.mode = "one_rank";
    whole.step_ms = quantile(whole_ms_.of_steps, 0.5);
    pipeline.speedup = paired_ratio(whole_ms_.of_rounds, pipeline_ms_.of_rounds);
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
  struct Times {
    std::vector<double> of_steps;
    std::vector<double> of_rounds;  // the median of a round's steps
  };

  ddp::PipelineSchedule schedule() const {
    if (options_.schedule == "gpipe") return ddp::PipelineSchedule::GPipe;
    return options_.schedule == "1f1b" ? ddp::PipelineSchedule::OneFOneB
                                       : ddp::PipelineSchedule::Interleaved;
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

  /// The other ranks leave the machine to rank 0 while it trains alone.
  void take_turn(Times& times, int steps, const std::function<void()>& step) {
    std::vector<double> ms;
    for (int i = 0; i < steps; ++i) {
      ddp::barrier(group_);
      const auto start = Clock::now();
      step();
      ddp::barrier(group_);
      ms.push_back(milliseconds(start, Clock::now()));
    }
    times.of_rounds.push_back(quantile(ms, 0.5));
    times.of_steps.insert(times.of_steps.end(), ms.begin(), ms.end());
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
  Times whole_ms_, pipeline_ms_;
  ddp::PipelineStats stats_;
};

}  // namespace

void run_pipeline(const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  constexpr double kMostDifference = 1e-5;
  at::set_num_threads(options.threads);
  PipelineBenchmark computing(options, group, /*sleeps=*/false);
  computing.run();
  PipelineBenchmark sleeping(options, group, /*sleeps=*/true);
  sleeping.run();
  if (group->getRank() == 0) {
    for (const auto* benchmark : {&computing, &sleeping}) {
      for (const auto& result : benchmark->results()) out << to_json(result) << "\n";
    }
    out.flush();
    if (!options.timeline.empty()) ddp::write_trace(options.timeline, sleeping.stats());
  }
  const double difference = computing.difference();
  TORCH_CHECK(
      difference <= kMostDifference, "--pp: expected the loss of one rank to ", kMostDifference,
      ", got a difference of ", difference, " on rank ", group->getRank(), " of ", group->getSize(),
      ".");
}

}  // namespace ddp_bench
