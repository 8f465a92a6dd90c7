// The five operators that LibTorch has for CUDA alone, for the CPU: in this program SyncBatchNorm
// takes them, and its other tests run with them. By the formulas of the kernels, in their dtypes.
#include <atomic>
#include <numeric>
#include <tuple>
#include <vector>

#include <ddp/ddp.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/ranks.h"
#include "training/sync_batch_norm/fused.h"

namespace ddp::testing {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

std::atomic<int> merges{0};

Tensor wide(const Tensor& t) {
  return t.to(t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Tensor by_channel(const Tensor& values, const Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = -1;
  return wide(values).view(shape);
}

std::vector<int64_t> all_but_channels(const Tensor& input) {
  std::vector<int64_t> dimensions(static_cast<size_t>(input.dim()) - 1);
  std::iota(dimensions.begin() + 1, dimensions.end(), 2);
  return dimensions;
}

std::tuple<Tensor, Tensor> stats(const Tensor& input, double eps) {
  const auto [var, mean] = at::var_mean(wide(input), all_but_channels(input), /*unbiased=*/false);
  return {mean, var.add(eps).rsqrt()};
}

std::tuple<Tensor, Tensor> gather_stats(
    const Tensor& input, const Tensor& means, const Tensor& inverses, const Optional& running_mean,
    const Optional& running_var, double momentum, double eps, const Tensor& counts) {
  ++merges;
  const bool tracks = running_mean && running_mean->defined();
  TORCH_CHECK(
      means.scalar_type() == wide(input).scalar_type() &&
          counts.scalar_type() == (tracks ? running_mean->scalar_type() : input.scalar_type()) &&
          wide(counts).scalar_type() == means.scalar_type(),
      "the kernel reads other dtypes");
  auto mean = at::zeros_like(means[0]), var_n = at::zeros_like(means[0]);
  auto n = at::zeros_like(counts[0]);
  for (int64_t rank = 0; rank < counts.numel(); ++rank) {
    const auto count = counts[rank], factor = 1 / (n + count);
    const auto distance = mean - means[rank];
    var_n =
        var_n + (inverses[rank].pow(-2) - eps) * count + distance * distance * n * count * factor;
    mean = n * factor * mean + count * factor * means[rank];
    n = (n + count).floor();  // an integer in the kernel
  }
  if (tracks) {
    // As the kernel, without a new version.
    auto kept_mean = running_mean->data(), kept_var = running_var->data();
    kept_mean.mul_(1 - momentum).add_(mean * momentum);
    kept_var.mul_(1 - momentum).add_(var_n / (n - 1) * momentum);
  }
  return {mean, (var_n / n + eps).rsqrt()};
}

Tensor elemt(
    const Tensor& input, const Optional& weight, const Optional& bias, const Tensor& mean,
    const Tensor& inverse, double /*eps*/) {
  auto out = (wide(input) - by_channel(mean, input)) * by_channel(inverse, input);
  if (weight) out = out * by_channel(*weight, input) + by_channel(*bias, input);
  return out.to(input.scalar_type()).contiguous(input.suggest_memory_format());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_reduce(
    const Tensor& dy, const Tensor& input, const Tensor& mean, const Tensor& inverse,
    const Optional& /*weight*/, bool of_input, bool of_weight, bool of_bias) {
  TORCH_CHECK(dy.suggest_memory_format() == input.suggest_memory_format());
  const auto sum = wide(dy).sum(all_but_channels(input));
  const auto sum_xmu =
      (wide(dy) * (wide(input) - by_channel(mean, input))).sum(all_but_channels(input));
  return {
      of_input ? sum : Tensor(), of_input ? sum_xmu : Tensor(),
      of_weight ? sum_xmu * inverse : Tensor(), of_bias ? sum.clone() : Tensor()};
}

Tensor backward_elemt(
    const Tensor& dy, const Tensor& input, const Tensor& mean, const Tensor& inverse,
    const Optional& weight, const Tensor& sum, const Tensor& sum_xmu, const Tensor& counts) {
  TORCH_CHECK(counts.scalar_type() == at::kInt, "the kernel reads integers");
  const auto n = counts.sum();
  auto scale = inverse;
  if (weight) scale = scale * wide(*weight);
  const auto centered = wide(input) - by_channel(mean, input);
  const auto dx = wide(dy) - by_channel(sum / n, input) -
                  centered * by_channel(inverse * inverse * sum_xmu / n, input);
  return (dx * by_channel(scale, input)).to(input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("batch_norm_stats", &stats);
  m.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  m.impl("batch_norm_elemt", &elemt);
  m.impl("batch_norm_backward_reduce", &backward_reduce);
  m.impl("batch_norm_backward_elemt", &backward_elemt);
}

}  // namespace

TEST_CASE("a device that has the fused operators runs them", "[ranks]") {
  const auto strided = torch::zeros({2, 3});
  CHECK(has_fused_operators(strided));
  CHECK(has_fused_operators(strided.to(torch::kBFloat16)));
  CHECK_FALSE(has_fused_operators(strided.to_sparse()));
  CHECK_FALSE(has_fused_operators(strided.to(torch::kMeta)));

  merges = 0;
  const auto versions = run_ranks<uint32_t>(2, [](const Rank& self) {
    SyncBatchNorm norm(SyncBatchNormOptions(3).process_group(self.group));
    const auto before = norm->running_mean._version();
    norm->forward(torch::ones({2, 3}) * self.rank).sum().backward();
    return norm->running_mean._version() - before;
  });
  CHECK(merges == 2);
  CHECK(versions == std::vector<uint32_t>{1, 1});
}

TEST_CASE("16-bit layers and layers that track nothing run the fused operators", "[ranks]") {
  const bool tracks = GENERATE(true, false), empty_rank = GENERATE(true, false);
  const bool is_half_layer = GENERATE(true, false);
  const auto whole = torch::linspace(-3, 5, 30).view({10, 3}).to(torch::kBFloat16);
  const auto expected = torch::batch_norm(
      whole.to(torch::kFloat), {}, {}, {}, {}, /*training=*/true, 0.1, 1e-5, false);
  const auto statistics = whole.to(torch::kFloat).mean(0) * 0.1;
  const auto worst = run_ranks<double>(3, [&](const Rank& self) {
    SyncBatchNorm norm(
        SyncBatchNormOptions(3).track_running_stats(tracks).process_group(self.group));
    if (is_half_layer) norm->to(torch::kBFloat16);
    const std::vector<int64_t> rows =
        empty_rank ? std::vector<int64_t>{0, 6, 4} : std::vector<int64_t>{2, 5, 3};
    const auto rank = static_cast<size_t>(self.rank);
    const auto x = whole.split_with_sizes(rows)[rank].clone().requires_grad_();
    const auto y = norm->forward(x);
    y.sum().backward();
    if (y.scalar_type() != torch::kBFloat16 || !x.grad().isfinite().all().item<bool>()) return 1e9;
    double worst = 0;
    if (rows[rank] > 0) {
      worst = (y - expected.split_with_sizes(rows)[rank]).abs().max().item<double>();
    }
    if (!tracks) return worst;
    return std::max(worst, (norm->running_mean - statistics).abs().max().item<double>());
  });
  for (const double error : worst) CHECK(error < 0.01);
}

}  // namespace ddp::testing
