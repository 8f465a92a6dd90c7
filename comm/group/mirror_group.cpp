#include <ddp/internal/membership/mirror_group.h>

#include <memory>
#include <numeric>

#include <ddp/elastic_errors.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backends/mirror_backend.h"
#include "group/monitored_group.h"
#include "monitor/job_monitor.h"

namespace ddp {

ProcessGroup make_mirror_group(int rank, int size, std::chrono::milliseconds timeout) {
  constexpr const char* kName = "default_pg";
  JobMonitor::Setup job;
  job.rank = rank;
  job.size = size;
  job.generation.number = -1;
  job.generation.report = [](const std::string& why) { return why; };
  GroupRecipe recipe;
  recipe.timeout = timeout;
  recipe.world_ranks.resize(static_cast<size_t>(size));
  std::iota(recipe.world_ranks.begin(), recipe.world_ranks.end(), 0);
  recipe.job = std::make_shared<JobMonitor>(std::move(job));
  recipe.is_mirror = true;
  const auto group = MonitoredGroup::make(c10::make_intrusive<c10d::HashStore>(), rank, size);
  group->setBackend(
      c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
      backends::make_mirror_backend(rank, size, timeout));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setGroupName(kName);
  group->setGroupDesc(kName);
  group->start_monitor(std::move(recipe), /*key=*/"");
  return group;
}

void end_mirror_group(const ProcessGroup& group) {
  const auto& own = dynamic_cast<const MonitoredGroup&>(*group);
  own.recipe().job->end_generation(
      GenerationEnd::RankLost, "this process has joined the ranks that train");
}

}  // namespace ddp
