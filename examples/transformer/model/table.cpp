#include "table.h"

#include <cmath>

#include <ATen/ATen.h>
#include <ddp/fully_sharded.h>
#include <ddp/functional.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>

namespace transformer {
namespace {

ddp::VocabParallelEmbedding cut_rows(
    const at::Tensor& whole, int64_t vocabulary, const Shape& shape, const ddp::ProcessGroup& tp) {
  return ddp::VocabParallelEmbedding(
      ddp::VocabParallelEmbeddingOptions(vocabulary, shape.width).process_group(tp), whole);
}

template <typename Holder>
TableLayer layer_of_table(const Holder& table, const at::Tensor& weight) {
  const auto module = table.ptr();
  return {
      module, [module](const at::Tensor& x) { return module->forward(x, /*is_head=*/false); },
      [module](const at::Tensor& x) { return module->forward(x, /*is_head=*/true); }, weight};
}

}  // namespace

TableImpl::TableImpl(int64_t vocabulary, const Shape& shape, const Groups& groups)
    : tp(groups.tp_size() > 1 ? groups.tp : ddp::ProcessGroup()) {
  const torch::nn::Embedding whole(vocabulary, shape.width);
  // The logits of vectors whose features have a variance of 1 have one of 1, too.
  torch::nn::init::normal_(whole->weight, 0, 1 / std::sqrt(static_cast<double>(shape.width)));
  if (tp) cut = cut_rows(whole->weight, vocabulary, shape, tp);
  weight = register_parameter("weight", tp ? cut->weight : whole->weight);
}

at::Tensor TableImpl::forward(const at::Tensor& x, bool is_head) {
  if (!is_head) return tp ? cut->forward(x) : at::embedding(weight, x);
  return at::linear(tp ? ddp::functional::copy_to_region(x, tp) : x, weight);
}

std::vector<ddp::ParameterLayout> TableImpl::layouts() {
  return tp ? cut->layouts() : std::vector<ddp::ParameterLayout>();
}

TableLayer make_table(int64_t vocabulary, const Shape& shape, const Groups& groups, bool is_unit) {
  const Table table(vocabulary, shape, groups);
  if (!is_unit) return layer_of_table(table, table->weight);
  const ddp::FullyShardedDataParallel unit(
      table, ddp::FullyShardedOptions().process_group(groups.data));
  return layer_of_table(unit, table->weight);
}

at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, int64_t vocabulary, const Groups& groups) {
  if (groups.tp_size() == 1) return at::cross_entropy_loss(logits, target);
  return ddp::vocab_parallel_cross_entropy(
      logits, target, groups.tp, ddp::VocabParallelCrossEntropyOptions().num_classes(vocabulary));
}

at::Tensor whole_vocabulary(const at::Tensor& logits, int64_t vocabulary, const Groups& groups) {
  if (groups.tp_size() == 1) return logits;
  return ddp::functional::gather_from_region(logits, groups.tp).narrow(-1, 0, vocabulary);
}

}  // namespace transformer
