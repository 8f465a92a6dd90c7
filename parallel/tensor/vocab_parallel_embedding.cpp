#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/functional.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/groups.h>
#include <ddp/vocab_parallel.h>
#include <torch/nn/modules/embedding.h>

#include "tensor/cut.h"

namespace ddp {
namespace {

constexpr const char* kVocabEmbedding = "VocabParallelEmbedding";

/// The tokens whose rows a rank has; the rest of its rows is padding.
struct OwnTokens {
  int64_t begin, count;
};

OwnTokens own_tokens(int64_t rows, int64_t tokens, const c10d::ProcessGroup& group) {
  const auto begin = std::min(group.getRank() * rows, tokens);
  return {begin, std::min(rows, tokens - begin)};
}

void check_tokens(const at::Tensor& tokens, int64_t classes, const c10d::ProcessGroup& group) {
  const bool are_numbers =
      tokens.defined() && (tokens.scalar_type() == at::kLong || tokens.scalar_type() == at::kInt);
  DDP_CHECK_VALUE(
      are_numbers, kVocabEmbedding, ": expected numbers of tokens, int64 or int32, got ",
      tokens.defined() ? c10::toString(tokens.scalar_type()) : "an undefined one", " ",
      on_rank_text(group), ". Convert them, or pass the layer's input.");
  // On a GPU the rest would wait for it.
  if (!tokens.is_cpu() || tokens.numel() == 0) return;
  const auto [least, most] = at::aminmax(tokens);
  const auto first = least.item<int64_t>(), last = most.item<int64_t>();
  DDP_CHECK_VALUE(
      first >= 0 && last < classes, kVocabEmbedding, ": expected numbers from 0 to ", classes - 1,
      ", got ", first < 0 ? first : last, " ", on_rank_text(group),
      ". Give num_embeddings the number of tokens.");
}

}  // namespace

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(const VocabParallelEmbeddingOptions& given)
    : options(given) {
  reset();
}

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(
    const VocabParallelEmbeddingOptions& given, const at::Tensor& whole)
    : options(given) {
  check_options();
  cut(whole);
  reset();
}

void VocabParallelEmbeddingImpl::check_options() {
  options.process_group(options.process_group().get());
  const auto& group = *options.process_group().get();
  check_divides(kVocabEmbedding, "num_embeddings", options.num_embeddings(), 1, "1", group);
  check_divides(kVocabEmbedding, "embedding_dim", options.embedding_dim(), 1, "1", group);
}

std::vector<ParameterLayout> VocabParallelEmbeddingImpl::layouts() {
  const auto group = options.process_group().get();
  const auto own = own_tokens(weight.size(0), options.num_embeddings(), *group);
  auto layout = layout_of_rows(
      "weight", weight, {options.num_embeddings(), options.embedding_dim()}, 1, group);
  layout.boxes[0].size[0] = own.count;
  if (own.count == 0) layout.boxes.clear();
  return {layout};
}

void VocabParallelEmbeddingImpl::cut(const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  const auto& group = *options.process_group().get();
  check_whole(
      kVocabEmbedding, "weight", whole, {options.num_embeddings(), options.embedding_dim()}, group);
  const int64_t rows = (whole.size(0) + group.getSize() - 1) / group.getSize();
  const auto own = own_tokens(rows, whole.size(0), group);
  weight = at::zeros({rows, whole.size(1)}, whole.options());
  weight.narrow(0, 0, own.count).copy_(whole.narrow(0, own.begin, own.count));
}

void VocabParallelEmbeddingImpl::reset() {
  if (!weight.defined()) {
    check_options();
    torch::nn::Embedding whole(options.num_embeddings(), options.embedding_dim());
    check_drawn_alike(kVocabEmbedding, whole->weight, options.process_group().get());
    cut(whole->weight);
  }
  weight = register_parameter("weight", weight.detach().clone());
  note_cut(layouts(), CutBy::Layer);
}

void VocabParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "ddp::VocabParallelEmbedding(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim()
         << ", ranks=" << options.process_group().get()->getSize() << ")";
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& input) {
  const auto group = options.process_group().get();
  log_layer_forward(weight);
  check_tokens(input, options.num_embeddings(), *group);
  const int64_t rows = weight.size(0);
  const auto row = input - group->getRank() * rows;
  const auto elsewhere = (row < 0).logical_or_(row >= rows);
  const auto looked_up = at::embedding(weight, row.masked_fill(elsewhere, 0));
  const auto part = looked_up.masked_fill(elsewhere.unsqueeze(-1), 0);
  return options.sequence_parallel() ? functional::reduce_scatter(part, 0, group)
                                     : functional::reduce_from_region(part, group);
}

}  // namespace ddp
