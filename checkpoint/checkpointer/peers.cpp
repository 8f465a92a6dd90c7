#include "checkpointer/peers.h"

#include <algorithm>
#include <utility>

namespace ddp {

CheckpointPeers::CheckpointPeers(ProcessGroup group)
    : group_(std::move(group)), monitor_(monitor_of(group_)) {}

std::vector<std::string> CheckpointPeers::gather(
    const std::string& text, const std::string& doing) {
  return gather_strings(text, group_, "Checkpointer: " + doing, monitor_.get());
}

std::vector<std::string> CheckpointPeers::agree(
    const std::string& text, const std::string& doing, ProblemOfRanks make_problem) {
  return ddp::agree(text, group_, "Checkpointer: " + doing, make_problem, monitor_.get());
}

std::vector<std::string> CheckpointPeers::agree_without(
    const std::string& problem, const std::string& text, const std::string& doing) {
  const auto agreed = agree(packed({problem, text}), doing, [&](const auto& by_rank) {
    return describe_problems(texts_by_position<2>(by_rank)[0], doing);
  });
  return texts_by_position<2>(agreed)[1];
}

std::string describe_problems(const std::vector<std::string>& by_rank, const std::string& doing) {
  std::string text;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& problem = by_rank[rank];
    // Keep a text that several ranks have only once, such as one about a file that all read.
    const auto end = by_rank.begin() + static_cast<std::ptrdiff_t>(rank);
    if (problem.empty() || std::find(by_rank.begin(), end, problem) != end) continue;
    text += ddp::str(
        text.empty() ? "Checkpointer: " : "\n", doing, " failed on rank ", rank, " of ",
        by_rank.size(), ": ", problem);
  }
  return text;
}

}  // namespace ddp
