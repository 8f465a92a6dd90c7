// A line-by-line port of transformer_block.py.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_transformer_block {

namespace {

constexpr int64_t kSeed = 5;
constexpr int kSteps = 10;
constexpr int64_t kVocabulary = 24, kLength = 8, kBatch = 3, kWidth = 16, kHeads = 4;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool sequence) {
    attention = register_module(
        "attention",
        ddp::ParallelMultiheadAttention(ddp::ParallelMultiheadAttentionOptions(kWidth, kHeads)
                                            .is_causal(true)
                                            .sequence_parallel(sequence)));
    up = register_module(
        "up",
        ddp::ColumnParallelLinear(
            ddp::ColumnParallelLinearOptions(kWidth, 4 * kWidth).sequence_parallel(sequence)));
    down = register_module(
        "down", ddp::RowParallelLinear(
                    ddp::RowParallelLinearOptions(4 * kWidth, kWidth).sequence_parallel(sequence)));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm1(x));
    return x + down(torch::gelu(up(norm2(x))));
  }

  torch::nn::LayerNorm norm1{
      register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  torch::nn::LayerNorm norm2{
      register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))};
  ddp::ParallelMultiheadAttention attention = nullptr;
  ddp::ColumnParallelLinear up = nullptr;
  ddp::RowParallelLinear down = nullptr;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(bool sequence) {
    embedding = register_module(
        "embedding",
        ddp::VocabParallelEmbedding(
            ddp::VocabParallelEmbeddingOptions(kVocabulary, kWidth).sequence_parallel(sequence)));
    block = register_module("block", Block(sequence));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    head = register_module(
        "head",
        ddp::ColumnParallelLinear(
            ddp::ColumnParallelLinearOptions(kWidth, kVocabulary).sequence_parallel(sequence)));
    if (!sequence) return;
    for (auto* part : {&block->norm1, &block->norm2, &norm}) ddp::mark_replicated_partial(**part);
  }

  at::Tensor forward(const at::Tensor& tokens) { return head(norm(block(embedding(tokens)))); }

  ddp::VocabParallelEmbedding embedding = nullptr;
  Block block = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  ddp::ColumnParallelLinear head = nullptr;
};
TORCH_MODULE(Model);

void train(const std::string& name, bool sequence) {
  torch::manual_seed(kSeed);  // the same weights on every rank, and as in Python
  Model model(sequence);
  model->to(torch::kDouble);
  torch::optim::SGD optimizer(model->parameters(), 0.2);
  const auto text = torch::arange(kLength * kBatch).view({kLength, kBatch});
  for (int step = 0; step < kSteps; ++step) {
    const auto tokens = (text * 7 + step) % kVocabulary;
    const auto target = (tokens * 5 + 1) % kVocabulary;
    optimizer.zero_grad();
    const auto loss = ddp::vocab_parallel_cross_entropy(model(tokens), target);
    loss.backward();
    optimizer.step();
    if (ddp::get_rank() == 0) {
      std::printf("%s: step %d: %.17g\n", name.c_str(), step, loss.item<double>());
    }
  }
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  train("tensor parallel", /*sequence=*/false);
  train("sequence parallel", /*sequence=*/true);
  ddp::barrier();
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
}

}  // namespace ddp_transformer_block
