#include "join/join_round.h"

#include <map>

#include <ATen/core/Tensor.h>
#include <ATen/core/functional.h>
#include <ATen/ops/zeros.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr int kActive = 1, kReduces = 2, kAdds = 4, kEventUnit = 8, kJoinableUnit = 32;

double encode(const RankStatus& status) {
  return (status.active ? kActive : 0) + (status.reduces ? kReduces : 0) +
         (status.adds ? kAdds : 0) + kEventUnit * static_cast<int>(status.place.event) +
         kJoinableUnit * status.place.joinable;
}

RankStatus decode(int word, double samples) {
  const auto event = static_cast<JoinPlace::Event>(word % kJoinableUnit / kEventUnit);
  return {
      (word & kActive) != 0,
      (word & kReduces) != 0,
      (word & kAdds) != 0,
      samples,
      {word / kJoinableUnit, event}};
}

std::string describe(const RankStatus& status) {
  if (!status.active) return "the end of the input";
  const auto [joinable, event] = status.place;
  const char* const names[] = {"an iteration", "the forward pass", "the backward pass"};
  return ddp::str(names[static_cast<int>(event)], " of object ", joinable);
}

}  // namespace

int JoinRound::active() const {
  return static_cast<int>(
      count_if(by_rank_, [](const RankStatus& status) { return status.active; }));
}

int JoinRound::last_active() const {
  int last = 0;
  for (int rank = 0; rank < size(); ++rank) {
    if (by_rank_[rank].active) last = rank;
  }
  return last;
}

bool JoinRound::adds() const {
  return any_of(by_rank_, [](const RankStatus& s) { return s.adds; });
}

double JoinRound::samples() const {
  double sum = 0;
  for (const auto& status : by_rank_) sum += status.samples;
  return sum;
}

std::vector<double> JoinRound::samples_by_rank() const {
  return c10::fmap(by_rank_, [](const auto& status) { return status.samples; });
}

std::string JoinRound::different_places(bool with_ended) const {
  std::map<std::string, std::vector<int>> ranks_at;
  for (int rank = 0; rank < size(); ++rank) {
    const auto& status = by_rank_[rank];
    if (status.active || with_ended) ranks_at[describe(status)].push_back(rank);
  }
  if (ranks_at.size() < 2) return {};
  std::vector<std::string> got;
  for (const auto& [place, ranks] : ranks_at) {
    got.push_back(ddp::str(place, " on ", ranks_text(ranks)));
  }
  return ddp::str(
      "join: expected all ranks at the same place of an iteration, got ", joined_by(", ", got),
      " of ", size(),
      ". Run the same averaged backward passes and steps of the objects in the same order on every "
      "rank. With throw_on_early_termination, run a backward pass after each forward pass, and "
      "compute metrics under torch::NoGradGuard.");
}

std::string JoinRound::disagreement() const {
  auto places = different_places(/*with_ended=*/false);
  if (!places.empty()) return places;
  std::vector<int> reducing, accumulating;
  for (int rank = 0; rank < size(); ++rank) {
    if (by_rank_[rank].active) (by_rank_[rank].reduces ? reducing : accumulating).push_back(rank);
  }
  if (reducing.empty() || accumulating.empty()) return {};
  return ddp::str(
      "DistributedDataParallel: expected all ranks with input to run this forward pass inside "
      "no_sync(), or all outside, but ",
      ranks_text(reducing), " will average its gradients and ", ranks_text(accumulating),
      " will not. Accumulate over as many forward passes on every rank.");
}

JoinRound all_reduce_status(
    const RankStatus& mine, const ProcessGroup& group, c10::Device device, GroupMonitor& monitor) {
  const int size = group->getSize();
  std::vector<RankStatus> by_rank(size);
  by_rank[group->getRank()] = mine;
  if (size == 1) return JoinRound(std::move(by_rank));
  DDP_CHECK(
      !is_capturing(device),
      "DistributedDataParallel: expected a graph to be captured in a step without a status "
      "exchange, got a join or Reduction::SampleWeighted on ",
      monitor.rank_text(), ". Capture without these.");
  // Each rank fills its own row of zeros, so the sum holds every rank's.
  auto table = at::zeros({size, 2}, at::kDouble);
  auto* row = table.mutable_data_ptr<double>() + 2 * group->getRank();
  row[0] = encode(mine);
  row[1] = mine.samples;
  std::vector<at::Tensor> tensors{table.to(device)};
  const auto where = [] { return std::string("learning what the ranks will do"); };
  monitor.abort_on_error(where, [&] { monitor.wait(*group->allreduce(tensors), where); });
  table = tensors.front().cpu();
  const auto* words = table.const_data_ptr<double>();
  for (int rank = 0; rank < size; ++rank) {
    by_rank[rank] = decode(static_cast<int>(words[2 * rank]), words[2 * rank + 1]);
  }
  JoinRound round(std::move(by_rank));
  const auto disagreement = round.disagreement();
  if (!disagreement.empty()) monitor.throw_agreed(disagreement);
  return round;
}

}  // namespace ddp
