#include "join_round.h"

#include <algorithm>
#include <map>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ddp/internal/check.h>
#include <ddp/internal/stream_capture.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr int kActive = 1, kReduces = 2, kPlaceUnit = 4;

std::string list_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined_by(", ", ranks);
}

std::string describe_place(int place) {
  if (place == 0) return "the beginning of an iteration";
  const bool in_backward = place == place_of(place / 2, /*in_backward=*/true);
  return ddp::str("the ", in_backward ? "backward" : "forward", " pass of object ", place / 2);
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

std::string JoinRound::different_places() const {
  std::map<int, std::vector<int>> ranks_at;
  for (int rank = 0; rank < size(); ++rank) ranks_at[by_rank_[rank].place].push_back(rank);
  if (ranks_at.size() < 2) return {};
  std::vector<std::string> got;
  for (const auto& [place, ranks] : ranks_at) {
    got.push_back(ddp::str(describe_place(place), " on ", list_ranks(ranks)));
  }
  return ddp::str(
      "join: expected all ranks at the same place of an iteration, got ", joined_by(", ", got),
      " of ", size(),
      ". Where several objects join, or with throw_on_early_termination, run one backward pass "
      "after each forward pass; compute metrics under torch::NoGradGuard.");
}

std::string JoinRound::disagreement() const {
  auto places = different_places();
  if (!places.empty()) return places;
  std::vector<int> reducing, accumulating;
  for (int rank = 0; rank < size(); ++rank) {
    if (by_rank_[rank].active) (by_rank_[rank].reduces ? reducing : accumulating).push_back(rank);
  }
  if (reducing.empty() || accumulating.empty()) return {};
  return ddp::str(
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
  DDP_CHECK(
      !is_capturing(device),
      "DistributedDataParallel: expected a graph to be captured where the ranks need not tell each "
      "other of a step, got a join or Reduction::SampleWeighted on ",
      monitor.rank_text(), ". Capture without these.");
  // Each rank fills its own row: the sum is everybody's.
  auto table = at::zeros({size, 2}, at::kDouble);
  auto* row = table.mutable_data_ptr<double>() + 2 * group->getRank();
  row[0] = (mine.active ? kActive : 0) + (mine.reduces ? kReduces : 0) + kPlaceUnit * mine.place;
  row[1] = mine.samples;
  std::vector<at::Tensor> tensors{table.to(device)};
  const auto where = [] { return std::string("learning what the ranks will do"); };
  monitor.abort_on_error(where, [&] { monitor.wait(*group->allreduce(tensors), where); });
  table = tensors.front().cpu();
  const auto* words = table.const_data_ptr<double>();
  for (int rank = 0; rank < size; ++rank) {
    const auto flags = static_cast<int>(words[2 * rank]);
    by_rank[rank] = {
        (flags & kActive) != 0, (flags & kReduces) != 0, words[2 * rank + 1], flags / kPlaceUnit};
  }
  JoinRound round(std::move(by_rank));
  const auto disagreement = round.disagreement();
  if (!disagreement.empty()) monitor.throw_agreed(disagreement);
  return round;
}

}  // namespace ddp
