#include "join_round.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

namespace ddp {
namespace {

constexpr int kActive = 1, kReduces = 2, kInBackward = 4;

std::string list_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

}  // namespace

int JoinRound::active() const {
  return static_cast<int>(std::count_if(
      by_rank_.begin(), by_rank_.end(), [](const RankEntry& entry) { return entry.active; }));
}

int JoinRound::last_active() const {
  int last = 0;
  for (int rank = 0; rank < size(); ++rank) {
    if (by_rank_[rank].active) last = rank;
  }
  return last;
}

bool JoinRound::reduces() const {
  return std::any_of(by_rank_.begin(), by_rank_.end(), [](const RankEntry& entry) {
    return entry.active && entry.reduces;
  });
}

double JoinRound::samples() const {
  double sum = 0;
  for (const auto& entry : by_rank_) sum += entry.samples;
  return sum;
}

std::string JoinRound::disagreement() const {
  std::vector<int> forward, backward;
  for (int rank = 0; rank < size(); ++rank) {
    (by_rank_[rank].in_backward ? backward : forward).push_back(rank);
  }
  if (!forward.empty() && !backward.empty()) {
    return c10::str(
        "DistributedDataParallel: expected each forward pass in this join to be followed by its "
        "backward pass, but ",
        list_ranks(backward), " began the backward pass and ", list_ranks(forward),
        " did not. Where several objects join, or with throw_on_early_termination, run forward "
        "passes "
        "that are not trained on (a metric, a skipped batch) under torch::NoGradGuard.");
  }
  std::vector<int> reducing, accumulating;
  for (int rank = 0; rank < size(); ++rank) {
    if (by_rank_[rank].active) (by_rank_[rank].reduces ? reducing : accumulating).push_back(rank);
  }
  if (reducing.empty() || accumulating.empty()) return {};
  return c10::str(
      "DistributedDataParallel: expected all ranks with input to run this forward pass inside "
      "no_sync(), or all outside, but ",
      list_ranks(reducing), " will average its gradients and ", list_ranks(accumulating),
      " will not. Accumulate over as many forward passes on every rank.");
}

JoinRound exchange_entries(
    const RankEntry& mine, const ProcessGroup& group, c10::Device device, GroupMonitor& monitor) {
  const int size = group->getSize();
  std::vector<RankEntry> by_rank(size);
  by_rank[group->getRank()] = mine;
  if (size == 1) return JoinRound(std::move(by_rank));
  // Each rank fills its own row: the sum is everybody's.
  auto table = at::zeros({size, 2}, at::kDouble);
  auto* row = table.mutable_data_ptr<double>() + 2 * group->getRank();
  row[0] = (mine.active ? kActive : 0) + (mine.reduces ? kReduces : 0) +
           (mine.in_backward ? kInBackward : 0);
  row[1] = mine.samples;
  std::vector<at::Tensor> tensors{table.to(device)};
  const auto where = [] { return std::string("learning what the ranks will do"); };
  monitor.abort_on_error(where, [&] { monitor.wait(*group->allreduce(tensors), where); });
  table = tensors.front().cpu();
  const auto* words = table.const_data_ptr<double>();
  for (int rank = 0; rank < size; ++rank) {
    const auto flags = static_cast<int>(words[2 * rank]);
    by_rank[rank] = {
        (flags & kActive) != 0, (flags & kReduces) != 0, words[2 * rank + 1],
        (flags & kInBackward) != 0};
  }
  return JoinRound(std::move(by_rank));
}

}  // namespace ddp
