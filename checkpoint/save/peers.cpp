#include "save/peers.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/gather_strings.h>
#include <ddp/internal/text.h>

namespace ddp {

CheckpointPeers::CheckpointPeers(ProcessGroup group)
    : group_(std::move(group)), monitor_(monitor_of(group_)) {}

std::vector<std::string> CheckpointPeers::gather(
    const std::string& text, const std::string& doing) {
  const auto where = [&] { return "Checkpointer: " + doing; };
  std::vector<std::string> texts;
  monitor_->check();
  monitor_->abort_on_error(where, [&] {
    texts = gather_strings(text, group_, [&](c10d::Work& work) { monitor_->wait(work, where); });
  });
  return texts;
}

void CheckpointPeers::throw_problems(
    const std::vector<std::string>& problems, const std::string& doing) {
  std::string text;
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    const auto& problem = problems[rank];
    // Keep a text that several ranks have only once, such as one about a file that all read.
    const auto end = problems.begin() + static_cast<std::ptrdiff_t>(rank);
    if (problem.empty() || std::find(problems.begin(), end, problem) != end) continue;
    text += ddp::str(
        text.empty() ? "Checkpointer: " : "\n", doing, " failed on rank ", rank, " of ",
        problems.size(), ": ", problem);
  }
  if (!text.empty()) throw_agreed(text);
}

}  // namespace ddp
