// A line-by-line port of pipeline.py.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_pipeline {

namespace {

constexpr int64_t kSeed = 5;
constexpr int kSteps = 8;
constexpr int64_t kVocabulary = 23, kLength = 12, kWidth = 14, kBlocks = 4;
constexpr int64_t kMicrobatches = 4, kRows = 8;
constexpr double kMaxNorm = 0.5;

/// As Python's: torch::nn::Linear rounds before it adds the bias.
at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return x + linear(down, torch::gelu(linear(up, norm(x))));
  }
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kWidth, 3 * kWidth))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(3 * kWidth, kWidth))};
};
TORCH_MODULE(Block);

/// The blocks of a stage, between the embedding and the head where it is the first or the last.
struct StageImpl : torch::nn::Module {
  /// Draws the whole model on every rank, and keeps a part of it.
  StageImpl(int64_t index, int64_t stages) {
    torch::manual_seed(kSeed);
    const torch::nn::Embedding whole_embedding(kVocabulary, kWidth);
    std::vector<Block> all;
    for (int64_t k = 0; k < kBlocks; ++k) all.emplace_back();
    const torch::nn::Linear whole_head(kWidth, kVocabulary);
    const auto own = kBlocks / stages;
    if (index == 0) embedding = register_module("embedding", whole_embedding);
    for (int64_t k = index * own; k < (index + 1) * own; ++k) {
      const auto& block = all[static_cast<size_t>(k)];
      blocks.push_back(register_module("block" + std::to_string(k), block));
    }
    if (index + 1 == stages) head = register_module("head", whole_head);
    to(torch::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    if (embedding) x = embedding(x);
    for (auto& block : blocks) x = block(x);
    return head ? linear(head, x) : x;
  }
  torch::nn::Embedding embedding = nullptr;
  std::vector<Block> blocks;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Stage);

using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>;

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), target.flatten());
}

void train(
    const std::string& name, ddp::PipelineSchedule schedule, int64_t chunks,
    const MakeOptimizer& make_optimizer) {
  const int rank = ddp::get_rank(), ranks = ddp::get_world_size();
  const auto mesh = ddp::init_device_mesh({ranks}, {"pp"});
  std::vector<Stage> stages;
  for (int64_t c = 0; c < chunks; ++c) stages.emplace_back(c * ranks + rank, chunks * ranks);
  ddp::PipelineStage pipeline(
      stages, rank, ranks, loss_of,
      ddp::PipelineOptions()
          .process_group(mesh.group("pp"))
          .schedule(schedule)
          .microbatches(kMicrobatches));
  const auto optimizer = make_optimizer(pipeline.parameters());
  const auto text = torch::arange(kLength * kRows).view({kRows, kLength});
  for (int step = 0; step < kSteps; ++step) {
    const auto tokens = (text * 7 + step) % kVocabulary;
    const auto target = (tokens * 5 + 1) % kVocabulary;
    optimizer->zero_grad();
    const auto result = pipeline.step(
        rank == 0 ? std::vector<at::Tensor>{tokens} : std::vector<at::Tensor>{},
        rank + 1 == ranks ? target : at::Tensor());
    const double norm = ddp::clip_grad_norm_(pipeline, kMaxNorm, mesh);
    optimizer->step();
    auto loss = torch::zeros({1}, torch::kDouble);
    for (const auto& part : result.losses) loss += part / kMicrobatches;
    ddp::all_reduce(loss);
    if (rank != 0) continue;
    std::printf("%s: step %d: %.17g\n", name.c_str(), step, loss.item<double>());
    std::printf("%s: norm %d: %.17g\n", name.c_str(), step, norm);
  }
}

std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.5).momentum(0.9));
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  train("GPipe", ddp::PipelineSchedule::GPipe, 1, adamw);
  train("1F1B", ddp::PipelineSchedule::OneFOneB, 1, sgd);
  train("interleaved", ddp::PipelineSchedule::Interleaved, 2, adamw);
  ddp::barrier();
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_pipeline
