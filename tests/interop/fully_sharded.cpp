// A line-by-line port of fully_sharded.py.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_fully_sharded {

namespace {

constexpr int64_t kSeed = 5;
constexpr int kSteps = 10;
constexpr int64_t kVocabulary = 23, kLength = 12, kWidth = 14, kBlocks = 3;

/// As Python's: torch::nn::Linear rounds before it adds the bias.
at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return torch::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const auto inner = linear(up, norm(x));
    seen = {x.scalar_type(), up->weight.scalar_type(), inner.scalar_type()};
    return x + linear(down, torch::gelu(inner));
  }

  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::Linear up{register_module("up", torch::nn::Linear(kWidth, 3 * kWidth))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(3 * kWidth, kWidth))};
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Block);

struct Way {
  std::string name;
  at::ScalarType dtype;
  ddp::FullyShardedOptions of_blocks;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)> make;
  std::optional<double> max_norm = {};
};

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const Way& way) {
    for (int64_t i = 0; i < kBlocks; ++i) {
      Block block;
      block->to(way.dtype);
      blocks.emplace_back(block, way.of_blocks);
      register_module("block" + std::to_string(i), blocks.back());
    }
    norm->to(way.dtype);
    embedding->to(way.dtype);
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
    head->to(way.dtype);
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = block(x);
    return linear(head, norm(x));
  }

  torch::nn::Embedding embedding{
      register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth))};
  std::vector<ddp::FullyShardedDataParallel<Block>> blocks;
  torch::nn::LayerNorm norm{
      register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Model);

void print(const std::string& key, const std::vector<double>& numbers) {
  if (ddp::get_rank() != 0) return;
  std::printf("%s:", key.c_str());
  for (const auto number : numbers) std::printf(" %.17g", number);
  std::printf("\n");
}

std::vector<double> by_rank(double number) {
  auto numbers = torch::zeros({ddp::get_world_size()}, torch::kDouble);
  numbers[ddp::get_rank()] = number;
  ddp::all_reduce(numbers);
  return {numbers.data_ptr<double>(), numbers.data_ptr<double>() + numbers.numel()};
}

void train(const Way& way) {
  torch::manual_seed(kSeed);  // the same weights on every rank, and as in Python
  auto options = way.of_blocks;
  ddp::FullyShardedDataParallel model(Model(way), options.reshard_after_forward(std::nullopt));
  const auto optimizer = way.make(model->parameters());
  const auto text = torch::arange(kLength * 4).view({4, kLength});
  at::Tensor logits;
  for (int step = 0; step < kSteps; ++step) {
    const auto tokens = (text * 7 + step + 3 * ddp::get_rank()) % kVocabulary;
    const auto target = (tokens * 5 + 1) % kVocabulary;
    optimizer->zero_grad();
    logits = model(tokens);
    const auto loss =
        torch::nn::functional::cross_entropy(logits.to(way.dtype).flatten(0, 1), target.flatten());
    loss.backward();
    std::vector<double> norms;
    if (way.max_norm) norms.push_back(ddp::clip_grad_norm_(*model, *way.max_norm));
    optimizer->step();
    print(way.name + ": step " + std::to_string(step), by_rank(loss.item<double>()));
    if (way.max_norm) print(way.name + ": norm " + std::to_string(step), norms);
  }
  const auto& net = *model->module();
  auto dtypes = net.blocks[0]->module()->seen;
  dtypes.push_back(logits.scalar_type());
  for (const auto& parameter : {net.blocks[0]->module()->up->weight, net.head->bias}) {
    dtypes.push_back(parameter.scalar_type());
    dtypes.push_back(parameter.grad().scalar_type());
  }
  std::vector<double> numbers;
  for (const auto dtype : dtypes) numbers.push_back(static_cast<double>(dtype));
  print(way.name + ": dtypes", numbers);
}

std::unique_ptr<torch::optim::Optimizer> adamw(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  const auto options = ddp::FullyShardedOptions();
  train({"AdamW", torch::kDouble, options, adamw, 0.5});
  train(
      {"SGD, kept whole", torch::kDouble, ddp::FullyShardedOptions().reshard_after_forward(false),
       sgd});
  const auto policy =
      ddp::MixedPrecisionPolicy().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat);
  train({"bfloat16", torch::kFloat, ddp::FullyShardedOptions().mp_policy(policy), adamw});
  ddp::barrier();
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_fully_sharded
