#include <algorithm>
#include <limits>
#include <variant>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/functional.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/vocab_parallel.h>

#include "tensor/cut.h"

namespace ddp {
namespace {

constexpr const char* kLoss = "vocab_parallel_cross_entropy";

using Options = VocabParallelCrossEntropyOptions;

/// Which classes the columns of this rank's logits are.
struct OwnClasses {
  int64_t all;    // V
  int64_t begin;  // the class of column 0
  int64_t count;  // of columns that are no padding
};

OwnClasses own_classes(
    const at::Tensor& logits, const Options& options, const c10d::ProcessGroup& group) {
  const int64_t columns = logits.size(-1);
  const int64_t classes = options.num_classes().value_or(columns * group.getSize());
  DDP_CHECK_VALUE(
      classes > 0 && classes <= columns * group.getSize(), kLoss, ": expected num_classes of 1 to ",
      columns * group.getSize(), ", the logits of all ranks, got ", classes, " ",
      on_rank_text(group), ". Give the number of classes without padding.");
  const int64_t begin = group.getRank() * columns;
  return {classes, begin, std::clamp(classes - begin, int64_t{0}, columns)};
}

void check_arguments(
    const at::Tensor& logits, const at::Tensor& target, const Options& options,
    const c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      logits.defined() && target.defined() && logits.dim() > 0 &&
          target.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      kLoss, ": expected logits [..., classes] and a target [...], got ", sizes_text(logits),
      " and ", sizes_text(target), " ", on_rank_text(group),
      ". Flatten both, or move the classes last.");
  DDP_CHECK_VALUE(
      target.scalar_type() == at::kLong, kLoss, ": expected a target of int64, got ",
      target.scalar_type(), " ", on_rank_text(group), ". Convert it.");
  DDP_CHECK_VALUE(
      options.label_smoothing() >= 0 && options.label_smoothing() <= 1, kLoss,
      ": expected label_smoothing of 0 to 1, got ", options.label_smoothing(), " ",
      on_rank_text(group), ". Give the part of a target that all classes share.");
}

// On a GPU this would wait for it.
void check_target(
    const at::Tensor& target, const at::Tensor& counts, int64_t classes,
    const c10d::ProcessGroup& group) {
  if (!target.is_cpu() || target.numel() == 0) return;
  const auto bad = counts.logical_and((target < 0).logical_or_(target >= classes));
  if (!bad.any().item<bool>()) return;
  DDP_CHECK_VALUE(
      false, kLoss, ": expected targets from 0 to ", classes - 1, " or ignore_index, got ",
      target.masked_select(bad)[0].item<int64_t>(), " ", on_rank_text(group),
      ". Set num_classes or ignore_index.");
}

at::Tensor largest_of_all(const at::Tensor& own, const at::Tensor& target, const GroupArg& group) {
  auto largest =
      own.size(-1) > 0
          ? own.detach().amax(-1)
          : at::full(target.sizes(), -std::numeric_limits<double>::infinity(), own.options());
  all_reduce(largest, c10d::ReduceOp::MAX, group);
  return largest;
}

}  // namespace

at::Tensor vocab_parallel_cross_entropy(
    const at::Tensor& given, const at::Tensor& target, const GroupArg& group_arg,
    const VocabParallelCrossEntropyOptions& options) {
  const auto group = group_arg.get();
  check_arguments(given, target, options, *group);
  const auto classes = own_classes(given, options, *group);
  const auto counts = target != options.ignore_index();
  check_target(target, counts, classes.all, *group);

  const bool is_half = given.scalar_type() == at::kHalf || given.scalar_type() == at::kBFloat16;
  auto logits = (is_half ? given.to(at::kFloat) : given).narrow(-1, 0, classes.count);
  logits = logits - largest_of_all(logits, target, group).unsqueeze(-1);

  const auto column = target - classes.begin;
  const auto is_here = (column >= 0).logical_and_(column < classes.count).logical_and_(counts);
  const auto picked =
      classes.count > 0
          ? logits.gather(-1, column.masked_fill(is_here.logical_not(), 0).unsqueeze(-1))
                .squeeze(-1)
                .masked_fill(is_here.logical_not(), 0)
          : logits.sum(-1);  // of none: 0
  std::vector<at::Tensor> parts{logits.exp().sum(-1), picked};
  const double smoothing = options.label_smoothing();
  if (smoothing > 0) parts.push_back(logits.sum(-1));
  const auto sums = functional::reduce_from_region(at::stack(parts), group);

  const auto log_sum = sums[0].log();
  auto losses = log_sum - sums[1];
  if (smoothing > 0) {
    const auto of_all = log_sum - sums[2] / static_cast<double>(classes.all);
    losses = losses * (1 - smoothing) + of_all * smoothing;
  }
  losses = losses.masked_fill(counts.logical_not(), 0);
  if (std::holds_alternative<torch::enumtype::kNone>(options.reduction())) return losses;
  if (std::holds_alternative<torch::enumtype::kSum>(options.reduction())) return losses.sum();
  return losses.sum() / counts.sum();
}

}  // namespace ddp
