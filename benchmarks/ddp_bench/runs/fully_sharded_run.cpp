#include "fully_sharded_run.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/fully_sharded.h>
#include <ddp/optim.h>
#include <torch/cuda.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "benchmarks/ddp_bench/engines/engine.h"
#include "benchmarks/ddp_bench/result.h"
#include "benchmarks/ddp_bench/statistics.h"
#include "examples/common/rank_device.h"
#include "memory_sampler.h"

namespace ddp_bench {
namespace {

constexpr int64_t kUnits = 8;
constexpr int64_t kUnitWidth = 1024;
constexpr int64_t kUnitRows = 128;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : fc(register_module(
            "fc", torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)))) {}
  at::Tensor forward(const at::Tensor& x) { return at::tanh(fc->forward(x)) + x; }
  torch::nn::Linear fc;
};
TORCH_MODULE(Layer);

/// A way to train the layers.
class Way {
 public:
  virtual ~Way() = default;
  virtual std::string mode() const = 0;
  virtual double step() = 0;
};

template <typename Model>
class WayOf : public Way {
 public:
  WayOf(std::string mode, Model model, at::Tensor input)
      : mode_(std::move(mode)),
        model_(std::move(model)),
        optimizer_(model_->parameters(), adamw()),
        input_(std::move(input)) {}

  std::string mode() const override { return mode_; }
  double step() override {
    optimizer_.zero_grad();
    const auto loss = model_->forward(input_).square().mean();
    loss.backward();
    optimizer_.step();
    if (loss.is_cuda()) torch::cuda::synchronize();
    return loss.template item<double>();
  }

 private:
  static ddp::optim::AdamWOptions adamw() { return ddp::optim::AdamWOptions(1e-4); }

  std::string mode_;
  Model model_;
  ddp::optim::AdamW optimizer_;  // fused, as the peer's
  at::Tensor input_;
};

/// Steps of a way, one after another.
struct Turn {
  std::vector<double> ms;
  double cpu_ms = 0;  // of a step; the mean of the ranks
  double loss = 0;    // of the last step
};

/// The turns of a way.
struct Times {
  std::vector<double> steps, of_rounds, cpu_of_rounds;
  double loss = 0;

  void add(const Turn& turn) {
    of_rounds.push_back(quantile(turn.ms, 0.5));
    cpu_of_rounds.push_back(turn.cpu_ms);
    steps.insert(steps.end(), turn.ms.begin(), turn.ms.end());
  }
};

class FullyShardedBenchmark {
 public:
  FullyShardedBenchmark(const Options& options, const ddp::ProcessGroup& group)
      : options_(options), group_(group), device_(examples::rank_device(options.backend)) {}

  std::vector<std::string> modes() const { return {"fsdp", "fsdp_kept", "ddp"}; }

  std::unique_ptr<Way> make(const std::string& mode, int64_t width = kUnitWidth) const {
    torch::manual_seed(static_cast<uint64_t>(options_.seed));
    torch::nn::Sequential net;
    if (mode == "ddp") {
      for (int64_t i = 0; i < kUnits; ++i) net->push_back(Layer(width));
      net->to(device_);
      auto wrapper = options_.wrapper;
      ddp::DistributedDataParallel model(net, wrapper.process_group(group_));
      return std::make_unique<WayOf<decltype(model)>>(mode, model, make_input(width));
    }
    ddp::FullyShardedOptions sharding;
    sharding.process_group(group_);
    if (mode == "fsdp_kept") sharding.reshard_after_forward(false);
    if (mode == "fsdp_alone") sharding.prefetch(0);
    for (int64_t i = 0; i < kUnits; ++i) {
      Layer layer(width);
      layer->to(device_);
      net->push_back(ddp::FullyShardedDataParallel(layer, sharding));
    }
    ddp::FullyShardedDataParallel model(net, sharding);
    return std::make_unique<WayOf<decltype(model)>>(mode, model, make_input(width));
  }

  void measure_times(std::ostream& out) {
    std::vector<std::unique_ptr<Way>> ways;
    for (const auto& mode : modes()) ways.push_back(make(mode));
    std::vector<Times> times(ways.size());
    for (int round = -1; round < options_.rounds; ++round) {
      for (size_t turn = 0; turn < ways.size(); ++turn) {
        const auto i = round % 2 == 0 ? turn : ways.size() - 1 - turn;
        const auto taken = take_turn(*ways[i], round < 0 ? options_.warmup : options_.iters);
        times[i].loss = taken.loss;
        if (round >= 0) times[i].add(taken);
      }
    }
    const auto& base = times.back();
    for (size_t i = 0; i < ways.size(); ++i) {
      auto result = describe(ways[i]->mode());
      result.step_ms = quantile(times[i].steps, 0.5);
      result.ratio = paired_ratio(times[i].of_rounds, base.of_rounds);
      const auto& cpu = times[i].cpu_of_rounds;
      result.cpu = {quantile(cpu, 0.5), paired_ratio(cpu, base.cpu_of_rounds)};
      if (group_->getRank() == 0) out << to_json(result) << std::endl;
    }
    for (size_t i = 0; i < ways.size(); ++i) {
      TORCH_CHECK(
          std::abs(times[i].loss - base.loss) <= 1e-5 * std::abs(base.loss),
          "--fsdp: expected the same loss of all modes, got ", times[i].loss, " of ",
          ways[i]->mode(), " and ", base.loss, " of ", ways.back()->mode(), " on rank ",
          group_->getRank(), " of ", group_->getSize(), ".");
    }
  }

  void measure_memory(const std::string& mode, std::ostream& out) {
    // What a process needs once for its first steps.
    take_turn(*make(mode, 64), 1);
    MemorySampler sampler;
    const auto before = sampler.peak();
    const auto way = make(mode, kUnitWidth);
    take_turn(*way, options_.warmup + options_.iters);
    const auto peak = sampler.stop().own() - before.own();
    const auto rest = sampler.latest().own() - before.own();
    auto sum = at::tensor({peak, rest}, at::kLong).to(device_);
    ddp::all_reduce(sum, c10d::ReduceOp::SUM, group_);
    auto result = describe(mode);
    result.peak_bytes = sum[0].item<int64_t>() / group_->getSize();
    result.rest_bytes = sum[1].item<int64_t>() / group_->getSize();
    if (group_->getRank() == 0) out << to_json(result) << std::endl;
    ddp::barrier(group_);
  }

 private:
  Turn take_turn(Way& way, int steps) const {
    Turn turn;
    ddp::barrier(group_);
    const double cpu_before = cpu_ms();
    for (int i = 0; i < steps; ++i) {
      const auto start = Clock::now();
      turn.loss = way.step();
      turn.ms.push_back(milliseconds(start, Clock::now()));
    }
    auto cpu = at::full({1}, (cpu_ms() - cpu_before) / steps, at::kDouble).to(device_);
    ddp::barrier(group_);
    ddp::all_reduce(cpu, c10d::ReduceOp::AVG, group_);
    turn.cpu_ms = cpu.item<double>();
    return turn;
  }

  at::Tensor make_input(int64_t width) const {
    torch::manual_seed(static_cast<uint64_t>(options_.seed + 1 + group_->getRank()));
    return at::randn({kUnitRows, width}).to(device_);
  }

  FullyShardedResult describe(const std::string& mode) const {
    FullyShardedResult result;
    result.mode = mode;
    result.backend = group_->getBackend(device_.type())->getBackendName();
    result.world = group_->getSize();
    result.bytes = kUnits * kUnitWidth * kUnitWidth * static_cast<int64_t>(sizeof(float));
    return result;
  }

  const Options& options_;
  ddp::ProcessGroup group_;
  c10::Device device_;
};

}  // namespace

void run_fully_sharded(const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  at::set_num_threads(options.threads);
  FullyShardedBenchmark benchmark(options, group);
  options.fsdp ? benchmark.measure_times(out) : benchmark.measure_memory(options.fsdp_memory, out);
}

}  // namespace ddp_bench
