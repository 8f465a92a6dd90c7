#include "context/block_attention.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

namespace ddp::functional {
namespace {

constexpr double kNoDropout = 0;
// The scores of these many queries exist at a time.
constexpr int64_t kQueries = 512;

/// The scores of some of the queries, from `begin` on.
at::Tensor scores_of(
    const at::Tensor& q, const at::Tensor& k, int64_t begin, const BlockOptions& options) {
  auto scores = at::matmul(q, k.transpose(-1, -2)).mul_(options.scale);
  if (!options.is_causal) return scores;
  const auto later =
      at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).triu_(begin + 1);
  return scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
}

template <typename Use>
void for_some_queries(int64_t queries, const Use& use) {
  for (int64_t begin = 0; begin < queries; begin += kQueries) {
    use(begin, std::min(kQueries, queries - begin));
  }
}

}  // namespace

BlockOutput attend_by_products(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockOptions& options) {
  const auto dtype = at::toOpMathType(q.scalar_type());
  const auto keys = k.to(dtype), values = v.to(dtype);
  std::vector<at::Tensor> outputs, log_sums;
  for_some_queries(q.size(-2), [&](int64_t begin, int64_t count) {
    const auto scores = scores_of(q.narrow(-2, begin, count).to(dtype), keys, begin, options);
    log_sums.push_back(scores.logsumexp(-1));
    outputs.push_back(at::matmul((scores - log_sums.back().unsqueeze(-1)).exp_(), values));
  });
  return {at::cat(outputs, -2).to(q.scalar_type()), at::cat(log_sums, -1)};
}

BlockGradients attend_by_products_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const BlockOutput& whole, const BlockOptions& options) {
  const auto dtype = at::toOpMathType(q.scalar_type());
  const auto keys = k.to(dtype), values = v.to(dtype);
  auto of_keys = at::zeros_like(keys), of_values = at::zeros_like(values);
  std::vector<at::Tensor> of_queries;
  for_some_queries(q.size(-2), [&](int64_t begin, int64_t count) {
    const auto some = [&](const at::Tensor& t) { return t.narrow(-2, begin, count).to(dtype); };
    const auto queries = some(q), incoming = some(gradient);
    const auto log_sum = whole.log_sum.narrow(-1, begin, count).unsqueeze(-1);
    const auto weights = (scores_of(queries, keys, begin, options) - log_sum).exp_();
    of_values += at::matmul(weights.transpose(-1, -2), incoming);
    const auto mean = (incoming * some(whole.output)).sum(-1, /*keepdim=*/true);
    const auto of_scores =
        (at::matmul(incoming, values.transpose(-1, -2)) - mean).mul_(weights).mul_(options.scale);
    of_queries.push_back(at::matmul(of_scores, keys));
    of_keys += at::matmul(of_scores.transpose(-1, -2), queries);
  });
  return {at::cat(of_queries, -2), of_keys, of_values};
}

BlockOutput attend(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const BlockOptions& options) {
  if (!q.is_cpu()) return attend_by_products(q, k, v, options);
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, kNoDropout, options.is_causal, /*attn_mask=*/{}, options.scale);
  return {output, log_sum};
}

BlockGradients attend_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const BlockOutput& whole, const BlockOptions& options) {
  if (!q.is_cpu()) return attend_by_products_backward(gradient, q, k, v, whole, options);
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, q, k, v, whole.output, whole.log_sum, kNoDropout, options.is_causal,
      /*attn_mask=*/{}, options.scale);
  return {of_q, of_k, of_v};
}

}  // namespace ddp::functional
