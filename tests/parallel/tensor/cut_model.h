// A small language model, whole and cut over a group, for tests that compare the two.
#pragma once

#include <limits>
#include <string>
#include <utility>

#include <ddp/ddp.h>
#include <ddp/internal/cut_parameters.h>
#include <torch/torch.h>

#include "support/nets.h"

namespace ddp::testing {

/// Sizes of the model. 7 tokens on 2 ranks: the last one has a row of padding.
constexpr int64_t kTokens = 7, kWidth = 8, kHidden = 16, kHeads = 4, kTime = 4;

/// A transformer block between an embedding and a head that share a weight.
struct WholeModelImpl : torch::nn::Module {
  explicit WholeModelImpl(uint64_t seed = 1)
      : embedding(register_module("embedding", torch::nn::Embedding(kTokens, kWidth))),
        norm1(register_module("norm1", norm())),
        attention(register_module("attention", torch::nn::MultiheadAttention(kWidth, kHeads))),
        norm2(register_module("norm2", norm())),
        up(register_module("up", torch::nn::Linear(kWidth, kHidden))),
        down(register_module("down", torch::nn::Linear(kHidden, kWidth))),
        norm3(register_module("norm3", norm())) {
    const torch::NoGradGuard no_grad;
    to(torch::kDouble);
    for (auto& p : parameters()) p.copy_(draw_values(p.sizes().vec(), seed++) * 0.3);
  }

  static torch::nn::LayerNorm norm() {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth}));
  }

  /// \param tokens  [kTime, N]. \return the loss of the next tokens.
  at::Tensor loss(const at::Tensor& tokens) {
    auto x = embedding->forward(tokens);
    const auto normed = norm1->forward(x);
    const auto before = torch::full({kTime, kTime}, -std::numeric_limits<double>::infinity());
    x = x + std::get<0>(attention->forward(
                normed, normed, normed, {}, /*need_weights=*/false, before.triu(1).to(x)));
    x = x + down->forward(torch::gelu(up->forward(norm2->forward(x))));
    const auto logits = torch::linear(norm3->forward(x), embedding->weight);
    return torch::nn::functional::cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 0).flatten());
  }

  torch::nn::Embedding embedding;
  torch::nn::LayerNorm norm1;
  torch::nn::MultiheadAttention attention;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
  torch::nn::LayerNorm norm3;
};
TORCH_MODULE(WholeModel);

/// How the model is cut, and computed.
struct Cut {
  bool sequence_parallel = false;
  bool marks_norms = true;        // what sequence_parallel needs
  bool recomputes_block = false;  // activation checkpointing
};

/// The same model, cut over a group.
struct CutModelImpl : torch::nn::Module {
  CutModelImpl(WholeModel whole, ProcessGroup group, const Cut& options = {})
      : tp(std::move(group)),
        cut(options),
        embedding(register_module(
            "embedding", VocabParallelEmbedding(
                             VocabParallelEmbeddingOptions(kTokens, kWidth)
                                 .sequence_parallel(cut.sequence_parallel)
                                 .process_group(tp),
                             whole->embedding->weight))),
        norm1(register_module("norm1", norm(whole->norm1))),
        attention(register_module(
            "attention", ParallelMultiheadAttention(
                             ParallelMultiheadAttentionOptions(kWidth, kHeads)
                                 .is_causal(true)
                                 .sequence_parallel(cut.sequence_parallel)
                                 .process_group(tp),
                             whole->attention))),
        norm2(register_module("norm2", norm(whole->norm2))),
        up(register_module(
            "up", ColumnParallelLinear(
                      ColumnParallelLinearOptions(kWidth, kHidden)
                          .sequence_parallel(cut.sequence_parallel)
                          .process_group(tp),
                      whole->up->weight, whole->up->bias))),
        down(register_module(
            "down", RowParallelLinear(
                        RowParallelLinearOptions(kHidden, kWidth)
                            .sequence_parallel(cut.sequence_parallel)
                            .process_group(tp),
                        whole->down->weight, whole->down->bias))),
        norm3(register_module("norm3", norm(whole->norm3))) {}

  torch::nn::LayerNorm norm(const torch::nn::LayerNorm& whole) const {
    auto copy = WholeModelImpl::norm();
    const torch::NoGradGuard no_grad;
    copy->weight.set_data(whole->weight.detach().clone());
    copy->bias.set_data(whole->bias.detach().clone());
    if (cut.sequence_parallel && cut.marks_norms) mark_replicated_partial(*copy, tp);
    return copy;
  }

  at::Tensor block(const at::Tensor& input) {
    const auto x = input + attention->forward(norm1->forward(input));
    return x + down->forward(torch::gelu(up->forward(norm2->forward(x))));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding->forward(tokens);
    if (cut.recomputes_block) {
      auto used = parameters();
      used.erase(used.begin());  // the embedding's weight
      x = checkpoint(
          CheckpointOptions().parameters(std::move(used)),
          [this](const at::Tensor& input) { return block(input); }, x);
    } else {
      x = block(x);
    }
    x = norm3->forward(x);
    x = cut.sequence_parallel ? functional::all_gather(x, 0, tp)
                              : functional::copy_to_region(x, tp);
    const auto logits = torch::linear(x, embedding->weight);
    return vocab_parallel_cross_entropy(
        logits, tokens.roll(-1, 0), tp, VocabParallelCrossEntropyOptions().num_classes(kTokens));
  }

  ProcessGroup tp;
  Cut cut;
  VocabParallelEmbedding embedding;
  torch::nn::LayerNorm norm1;
  ParallelMultiheadAttention attention;
  torch::nn::LayerNorm norm2;
  ColumnParallelLinear up;
  RowParallelLinear down;
  torch::nn::LayerNorm norm3;
};
TORCH_MODULE(CutModel);

/// The name of a cut model's parameter in the whole one.
inline std::string name_in_whole(std::string name) {
  const std::string own = "attention.in_proj.";
  return name.rfind(own, 0) == 0 ? name.replace(0, own.size(), "attention.in_proj_") : name;
}

/// The largest distance of an element, or with `of_gradients` of a gradient's, that this rank has
/// of the cut model from the whole one's.
inline double distance_from_whole(
    const torch::nn::Module& cut, const WholeModel& whole, bool of_gradients = false) {
  const auto parameters = whole->named_parameters();
  const torch::NoGradGuard no_grad;
  double largest = 0;
  for (const auto& layout : layouts_of(cut)) {
    const auto& of_whole = parameters[name_in_whole(layout.name)];
    const auto all = of_gradients ? of_whole.grad() : of_whole;
    const auto own = of_gradients ? layout.local.grad() : layout.local;
    if (!own.defined() || all.sizes() != at::IntArrayRef(layout.sizes)) return 1e300;
    const auto views = views_of_boxes(layout, own);
    for (size_t i = 0; i < views.size(); ++i) {
      auto box = all;
      for (int64_t d = 0; d < all.dim(); ++d) {
        const auto at = static_cast<size_t>(d);
        box = box.narrow(d, layout.boxes[i].offset[at], layout.boxes[i].size[at]);
      }
      const auto distance = (views[i].to(torch::kDouble) - box).abs().max().item<double>();
      if (!(distance <= largest)) largest = distance;
    }
  }
  return largest;
}

/// Batch number `step` of all replicas: [kTime, samples], integers.
inline at::Tensor tokens_of(int64_t step, int64_t samples) {
  const auto numbers = torch::arange(kTime * samples).view({kTime, samples});
  return (numbers * numbers + numbers * step + step).remainder(kTokens);
}

}  // namespace ddp::testing
