// What a group's monitor knows of the steps that the ranks run beside its collectives.
#include <ddp/internal/shared_steps.h>

#include <algorithm>
#include <utility>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/rank_text.h>

#include "monitor/job_monitor.h"
#include "monitor/rank_report.h"
#include "store/store_executor.h"

namespace ddp {

int GroupMonitor::add_steps(const std::shared_ptr<SharedSteps>& steps) {
  const std::lock_guard lock(mutex_);
  steps_.erase(
      std::remove_if(
          steps_.begin(), steps_.end(), [](const auto& earlier) { return earlier.expired(); }),
      steps_.end());
  steps_.push_back(steps);
  setup_.job->add_steps(steps, store_);
  return steps_added_++;
}

std::vector<std::shared_ptr<SharedSteps>> GroupMonitor::shared_steps() const {
  std::vector<std::shared_ptr<SharedSteps>> alive;
  const std::lock_guard lock(mutex_);
  for (const auto& steps : steps_) {
    if (auto one = steps.lock()) alive.push_back(std::move(one));
  }
  return alive;
}

uint64_t GroupMonitor::count_steps() const {
  uint64_t count = 0;
  for (const auto& steps : shared_steps()) count += steps->count();
  // Steps whose owner was destroyed count on, so that the sum does not fall.
  const std::lock_guard lock(mutex_);
  return most_steps_ = std::max(most_steps_, count);
}

void GroupMonitor::post(std::function<void(c10d::Store&)> call) {
  if (!is_watching() || !store_) return;
  setup_.job->executor().post(
      [call = std::move(call), of_group = store_](c10d::Store&) { call(*of_group); });
}

/// Names the waiting ranks that ran a step that others did not run: the likely cause if the ranks
/// wait in different collectives. "" if all ran the same number.
std::string GroupMonitor::describe_uneven_steps(const std::vector<RankReport>& waiting) const {
  const auto waits_here = [this](const RankReport& rank) {
    return !rank.where.empty() && rank.group == setup_.key;
  };
  std::optional<uint64_t> most, least;
  for (const auto& rank : waiting) {
    if (!waits_here(rank)) continue;
    most = std::max(most.value_or(rank.steps), rank.steps);
    least = std::min(least.value_or(rank.steps), rank.steps);
  }
  const auto steps = shared_steps();
  if (most == least || steps.empty()) return "";
  std::vector<int> more, fewer;
  for (size_t rank = 0; rank < waiting.size(); ++rank) {
    if (!waits_here(waiting[rank])) continue;
    const int in_job = job_rank(static_cast<int>(rank));
    if (waiting[rank].steps == *most) more.push_back(in_job);
    if (waiting[rank].steps == *least) fewer.push_back(in_job);
  }
  return steps.front()->explain(ranks_text(more), ranks_text(fewer));
}

}  // namespace ddp
