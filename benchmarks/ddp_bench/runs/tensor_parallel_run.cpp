#include "tensor_parallel_run.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <ddp/collectives.h>
#include <ddp/functional.h>
#include <ddp/parallel_linear.h>
#include <torch/cuda.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "benchmarks/ddp_bench/engines/engine.h"
#include "benchmarks/ddp_bench/engines/message_sender.h"
#include "benchmarks/ddp_bench/result.h"
#include "benchmarks/ddp_bench/statistics.h"
#include "beside_one_rank.h"
#include "examples/common/rank_device.h"

namespace ddp_bench {
namespace {

constexpr int64_t kFeatures = 1024;
constexpr int64_t kHidden = 4096;
constexpr int64_t kRowsOfLayers = 512;
constexpr double kRateOfLayers = 1e-3;

struct LinearBatch {
  LinearBatch(int64_t seed, c10::Device device) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    input = at::randn({kRowsOfLayers, kFeatures}).to(device).requires_grad_();
    target = at::randn({kRowsOfLayers, kFeatures}).to(device);
  }

  at::Tensor input;
  at::Tensor target;
};

/// Two layers and their optimizer; the layers are whole or cut.
template <typename First, typename Second>
class LinearLayers {
 public:
  LinearLayers(LinearBatch batch, First first, Second second)
      : batch_(std::move(batch)), first_(std::move(first)), second_(std::move(second)) {
    first_->to(batch_.input.device());
    second_->to(batch_.input.device());
    optimizer_ = std::make_unique<torch::optim::SGD>(parameters(), kRateOfLayers);
  }

  void step() {
    optimizer_->zero_grad();
    batch_.input.mutable_grad().reset();
    const auto output = second_->forward(at::gelu(first_->forward(batch_.input)));
    (output - batch_.target).square().sum(1).mean().backward();
    optimizer_->step();
    if (output.is_cuda()) torch::cuda::synchronize();
  }

  /// Weight and bias of the first layer, then of the second.
  std::vector<at::Tensor> parameters() const {
    auto all = first_->parameters();
    for (const auto& parameter : second_->parameters()) all.push_back(parameter);
    return all;
  }

 private:
  LinearBatch batch_;
  First first_;
  Second second_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

using WholeLayers = LinearLayers<torch::nn::Linear, torch::nn::Linear>;
using CutLayers = LinearLayers<ddp::ColumnParallelLinear, ddp::RowParallelLinear>;

class TensorParallelBenchmark {
 public:
  TensorParallelBenchmark(const Options& options, const ddp::ProcessGroup& group)
      : options_(options),
        group_(group),
        device_(examples::rank_device(options.backend)),
        sender_(group, device_),
        times_(options, group) {
    if (group->getRank() == 0) whole_ = make_whole();
    cut_ = make_cut();
  }

  void run() {
    sender_.send(messages());
    times_.run(
        [&] { step_whole(); }, [&] { cut_->step(); },
        [&] {
          for (int i = 0; i < options_.iters; ++i) messages_ms_.push_back(sender_.send(messages()));
        });
  }

  std::vector<TensorParallelResult> results() const {
    TensorParallelResult whole;
    whole.mode = "one_rank";
    whole.backend = group_->getBackend(device_.type())->getBackendName();
    whole.world = group_->getSize();
    auto cut = whole;
    cut.mode = "tensor_parallel";
    whole.step_ms = times_.alone_ms();
    cut.step_ms = times_.together_ms();
    cut.speedup = times_.speedup();
    cut.messages_ms = quantile(messages_ms_, 0.5);
    return {whole, cut};
  }

  /// The largest difference between a parameter of the whole layers and of the cut ones, which
  /// took the same steps. Collective.
  double difference() const {
    auto parameters = cut_->parameters();
    for (size_t i = 0; i < 3; ++i) {  // the second bias is whole
      const int64_t cut_dim = i == 2 ? 1 : 0;
      parameters[i] = ddp::functional::gather_from_region(parameters[i].detach(), group_, cut_dim);
    }
    auto most = at::zeros({1}, at::dtype(at::kFloat).device(device_));
    for (size_t i = 0; whole_ && i < parameters.size(); ++i) {
      const auto other = whole_->parameters()[i].detach();
      most = at::maximum(most, (parameters[i].detach() - other).abs().max());
    }
    ddp::broadcast(most, 0, group_);
    return most.item<double>();
  }

 private:
  std::unique_ptr<WholeLayers> make_whole() const {
    const LinearBatch batch(options_.seed, device_);
    const torch::nn::Linear first(kFeatures, kHidden);
    return std::make_unique<WholeLayers>(batch, first, torch::nn::Linear(kHidden, kFeatures));
  }

  std::unique_ptr<CutLayers> make_cut() const {
    const LinearBatch batch(options_.seed, device_);
    const auto first = ddp::ColumnParallelLinearOptions(kFeatures, kHidden).process_group(group_);
    const auto second = ddp::RowParallelLinearOptions(kHidden, kFeatures).process_group(group_);
    const ddp::ColumnParallelLinear first_layer(first);
    return std::make_unique<CutLayers>(batch, first_layer, ddp::RowParallelLinear(second));
  }

  void step_whole() {
    if (whole_) whole_->step();
  }

  /// The output's sum in forward, the input's gradient's in backward.
  static Messages messages() {
    return {{kRowsOfLayers * kFeatures, kRowsOfLayers * kFeatures}, /*one_by_one=*/true};
  }

  const Options& options_;
  ddp::ProcessGroup group_;
  c10::Device device_;
  MessageSender sender_;
  std::unique_ptr<WholeLayers> whole_;  // on rank 0
  std::unique_ptr<CutLayers> cut_;
  BesideOneRank times_;
  std::vector<double> messages_ms_;
};

}  // namespace

void run_tensor_parallel(
    const Options& options, const ddp::ProcessGroup& group, std::ostream& out) {
  constexpr double kMostDifference = 1e-5;
  at::set_num_threads(options.threads);
  TensorParallelBenchmark benchmark(options, group);
  benchmark.run();
  if (group->getRank() == 0) {
    for (const auto& result : benchmark.results()) out << to_json(result) << "\n";
    out.flush();
  }
  const double difference = benchmark.difference();
  TORCH_CHECK(
      difference <= kMostDifference, "--tp: expected the parameters of one rank to ",
      kMostDifference, ", got a difference of ", difference, " on rank ", group->getRank(), " of ",
      group->getSize(), ".");
}

}  // namespace ddp_bench
