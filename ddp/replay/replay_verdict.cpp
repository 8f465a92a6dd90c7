#include "replay/replay_verdict.h"

#include <set>

#include <ATen/core/functional.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "replicas/vote.h"

namespace ddp {
namespace {

constexpr const char* kExpected =
    "replay_every: expected the same bits of a micro-batch on the rank that trains it and on the "
    "next one, ";
constexpr const char* kRemedyOfReplay =
    " If the module is deterministic, memory or computation there is wrong: take the host, or its "
    "GPU, out of the job.";
constexpr const char* kNotRepeated =
    "the module or the loss does not repeat itself: an operator that is not deterministic, a "
    "value that forward keeps outside of its buffers, or a part of the loss that has parameters "
    "and does not come from what forward returned. Leave replay_every out.";

std::vector<int> wrong_of(const ReplayedBatch& batch, int rank, int ranks) {
  const int next = (rank + 1) % ranks;
  if (ranks == 2) return {rank, next};
  if (batch.own == batch.by_third) return {next};
  if (batch.by_next == batch.by_third) return {rank};
  return {rank, next, (rank + 2) % ranks};
}

const char* part_of(const ReplayedBatch& batch) {
  return batch.own.outputs != batch.by_next.outputs ? "forward's outputs" : "its gradients";
}

std::string text_of_batches(const std::vector<int>& disputed, const std::vector<int>& job_ranks) {
  const auto in_job = [&](int rank) { return job_ranks.at(static_cast<size_t>(rank)); };
  if (all_of(disputed, [&](int rank) { return in_job(rank) == rank; })) {
    return ranks_text(disputed) + "'s batch";
  }
  return "the batch of " + joined_by(", ", c10::fmap(disputed, [&](int rank) {
                                       return describe_rank(rank, in_job(rank));
                                     }));
}

}  // namespace

ReplayVerdict judge(
    const std::vector<ReplayedBatch>& batches, const std::vector<std::string>& hosts,
    const std::vector<int>& job_ranks) {
  const auto ranks = static_cast<int>(batches.size());
  std::vector<int> disputed;
  std::set<int> wrong;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& batch = batches[static_cast<size_t>(rank)];
    if (!batch.is_disputed()) continue;
    disputed.push_back(rank);
    for (const int one : wrong_of(batch, rank, ranks)) wrong.insert(one);
  }
  if (disputed.empty()) return {};
  const auto& first = batches[static_cast<size_t>(disputed.front())];
  auto text = ddp::str(
      kExpected, "got others in ", part_of(first), " of ", text_of_batches(disputed, job_ranks));
  const bool are_all = disputed.size() == batches.size();
  if (are_all && ranks > 2) return {text + ". All batches differ, so " + kNotRepeated, {}};
  ReplayVerdict verdict{"", {wrong.begin(), wrong.end()}};
  const auto names = joined_by(", ", c10::fmap(verdict.wrong, [&](int rank) {
                                 const auto r = static_cast<size_t>(rank);
                                 return describe_rank(rank, job_ranks.at(r), hosts.at(r));
                               }));
  const bool is_decided = ranks > 2 && verdict.wrong.size() < 3;
  verdict.text = ddp::str(
      text, is_decided ? ". By a third rank wrong: " : ". Any of these may be wrong: ", names, ".",
      kRemedyOfReplay, are_all ? " Else " : "", are_all ? kNotRepeated : "");
  return verdict;
}

}  // namespace ddp
