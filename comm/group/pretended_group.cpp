#include "group/pretended_group.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "backends/gpu_assignment.h"
#include "group/backend_spec.h"
#include "group/group_builder.h"
#include "group/monitored_group.h"
#include "monitor/job_monitor.h"
#include "pretend/pretend_backend.h"

namespace ddp {
namespace {

constexpr int kDefaultPort = 29500;

std::shared_ptr<PretendedJob> meet_present_ranks(
    const PretendedRank& self, const Environment& environment, const GroupRecipe& recipe) {
  backends::Setup setup;
  setup.timeout = recipe.timeout;
  setup.connect_by = Deadline(recipe.timeout);
  setup.gloo_devices = recipe.gloo_devices;
  const auto port = environment.master_port
                        ? parse_int(*environment.master_port, {1, kMaxPort}, kLauncherRemedy)
                        : kDefaultPort;
  const auto address =
      environment.master_addr ? environment.master_addr->value : std::string("127.0.0.1");
  return connect_present_ranks(self, setup, address, port);
}

/// Whether this process has a GPU for the backend; the other ranks do not vote.
bool take_gpu(const BackendSpec& backends, const Environment& environment) {
  const auto picker = device_picker(backends);
  if (!picker || !picker->backend->why_unusable.empty()) return false;
  const auto gpu =
      choose_gpu(environment.local_rank, visible_devices(picker->device), {}, picker->device);
  return gpu.device.has_value();
}

}  // namespace

ProcessGroup build_pretended_group(
    const ProcessGroupOptions& options, const Environment& environment, const PretendedRank& self) {
  start_call_log(environment, self.rank, self.world_size);
  GroupRecipe recipe;
  recipe.backends = parse_backend(options.backend(), /*gpus_are_usable=*/true);
  recipe.backends_required = !options.backend().empty();
  recipe.timeout = std::min(options.timeout(), Deadline::kLongest);
  recipe.nccl = options.nccl();
  recipe.gloo_devices = choose_gloo_devices(environment, "");
  if (options.backend().empty() && !take_gpu(recipe.backends, environment)) {
    recipe.backends = parse_backend("", /*gpus_are_usable=*/false);
  }
  recipe.device_id = options.device_id();
  recipe.world_ranks = numbers_up_to(self.world_size);
  recipe.pretended = meet_present_ranks(self, environment, recipe);
  JobMonitor::Setup job;
  job.rank = self.rank;
  job.size = self.world_size;
  recipe.job = std::make_shared<JobMonitor>(std::move(job));
  const auto store = c10::make_intrusive<BoundedStore>(
      c10::make_intrusive<c10d::HashStore>(), "which this process hosts");
  return connect_group(
      recipe, Deadline(recipe.timeout), store, self.rank, "default_pg", /*key=*/"");
}

void start_call_log(const Environment& environment, int rank, int world_size) {
  const auto folder = read_variable(process_variable, "DDP_CALLS_DIR");
  if (!folder) return;
  const auto host_ranks = environment.local_world_size
                              ? parse_int(*environment.local_world_size, {1}, kLauncherRemedy)
                              : world_size;
  CallLog::start(folder->value, rank, world_size, host_ranks);
}

}  // namespace ddp
