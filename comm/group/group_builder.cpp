#include "group/group_builder.h"

#include <algorithm>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include <c10/util/Logging.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

#include "backends/gpu_assignment.h"
#include "backends/nccl/nccl_options.h"
#include "backends/registry.h"
#include "backends/single_rank_backend.h"
#include "group/monitored_group.h"
#include "monitor/job_monitor.h"
#include "monitor/liveness_socket.h"
#include "rendezvous/rendezvous.h"
#include "store/bounded_store.h"
#include "store/startup_barrier.h"

namespace ddp {
namespace {

constexpr auto kReportGrace = std::chrono::seconds(2);

using backends::BackendPtr;
using BoundedStorePtr = c10::intrusive_ptr<BoundedStore>;

// C++ programs print errors only, unless c10 reads TORCH_CPP_LOG_LEVEL.
void initialize_logging() {
  static const bool once = [] {
    if (process_variable("TORCH_CPP_LOG_LEVEL")) c10::initLogging();
    return true;
  }();
  (void)once;
}

// Gloo and TCPStore's server write to sockets whose other end may be closed. By default SIGPIPE
// then ends the process, and no rank would know which rank died first. Unlike SIG_IGN, a handler
// is not inherited by the programs that this process starts. A program's own handler is kept.
void ignore_broken_pipes() {
  struct sigaction action = {};
  ::sigaction(SIGPIPE, nullptr, &action);
  if (action.sa_handler != SIG_DFL) return;
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGPIPE, &action, nullptr);
}

// The startup barrier of all ranks, and the store that it runs in.
struct StartupPoint {
  BoundedStorePtr store;
  StartupBarrier barrier;
};

StartupPoint make_startup_point(const Rendezvous& met, const Deadline& deadline) {
  const auto store = BoundedStore(met.store, met.store_host).with_prefix("ddp");
  return {
      store,
      {store->with_prefix("init"), met.rank, met.world_size, deadline, "init_process_group"}};
}

// Returns the same store over another connection if the store can be cloned. Done while the store's
// host is there to answer.
BoundedStorePtr open_another_connection(const BoundedStorePtr& store, const Deadline& deadline) {
  BoundedStorePtr another;
  problem_of([&] { another = bounded(store->with_deadline(deadline)->clone()); });
  return another ? another : store;
}

// Waits until every rank of the barrier has connected its backends. The store must exist until
// then, and may be in the process of a rank that is done.
ProcessGroup connect_all(StartupBarrier barrier, const std::function<ProcessGroup()>& connect_own) {
  ProcessGroup group;
  const auto problem = problem_of([&] { group = connect_own(); });
  // Ranks that fail at the deadline need time to report it.
  barrier.deadline = barrier.deadline.and_then(kReportGrace);
  run_startup_barrier(barrier, "connected", problem);
  return group;
}

std::shared_ptr<JobMonitor> start_job_monitor(
    const Rendezvous& met, const BoundedStorePtr& store, const GlooDevices& devices,
    const Deadline& deadline, GenerationOfJob generation) {
  JobMonitor::Setup setup;
  setup.generation = std::move(generation);
  setup.rank = met.rank;
  setup.size = met.world_size;
  if (met.world_size == 1) return std::make_shared<JobMonitor>(setup);
  const auto own = open_another_connection(store, deadline)->with_prefix("monitor");
  setup.store = own->unbounded();  // the monitor's thread may be abandoned
  setup.store_host = met.hosting_rank;
  setup.liveness = std::make_shared<LivenessSocket>(devices);
  return JobMonitor::connect(setup, *own->with_deadline(deadline));
}

}  // namespace

int local_rank_of(const Environment& environment, int world_size) {
  if (environment.local_rank) return parse_int(*environment.local_rank, {0}, kLauncherRemedy);
  DDP_CHECK(
      world_size == 1,
      "get_local_rank: expected LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or "
      "SLURM_LOCALID in the environment, got none of them in a world of ",
      world_size,
      " ranks. Start the program with ddprun, torchrun, mpirun or srun, or set LOCAL_RANK.");
  return 0;
}

std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device) {
  return group.getBackend(device)->getBackendName();
}

ProcessGroup connect_group(
    const GroupRecipe& recipe, const Deadline& deadline, const BoundedStorePtr& store, int rank,
    const std::string& name, const std::string& key, const ProcessGroup& parent) {
  const int size = static_cast<int>(recipe.world_ranks.size());
  const auto group = MonitoredGroup::make(store, rank, size);
  // A world of one has the backend that its user chose.
  const bool is_subgroup_of_one = size == 1 && recipe.job->size() > 1;
  std::map<std::string, BackendPtr> made;
  // c10d uses it for calls without a tensor: as in Python, the backend of the GPUs if there is one.
  std::string default_backend;
  for (const auto& [device, backend] : recipe.backends) {
    const auto& description = *backends::find(backend);
    auto& instance = made[backend];
    if (!instance && is_subgroup_of_one) {
      instance = backends::make_single_rank_backend(backend, recipe.timeout);
    } else if (!instance) {
      instance = description.make(
          // The deadline limits connecting; NCCL connects, and uses the store, in the first
          // collective.
          {description.find_gpu != nullptr ? store->with_prefix(backend)
                                           : store->with_prefix(backend)->with_deadline(deadline),
           rank,
           size,
           recipe.timeout,
           deadline,
           name,
           {recipe.world_ranks.begin(), recipe.world_ranks.end()},
           recipe.gloo_devices,
           recipe.backends_required,
           parent ? parent->getBackend(c10::Device(device).type()) : nullptr,
           recipe.device_id,
           recipe.nccl});
    }
    group->setBackend(
        c10::Device(device).type(),
        c10d::ProcessGroup::strToBackendType(instance->getBackendName()), instance);
    if (default_backend.empty() || description.find_gpu != nullptr) {
      default_backend = instance->getBackendName();
    }
  }
  group->setDefaultBackend(default_backend);
  group->setGroupName(name);
  group->setGroupDesc(name);
  if (recipe.device_id) group->setBoundDeviceId(recipe.device_id);
  group->start_monitor(recipe, key);
  return group;
}

void check_gpu_options(const ProcessGroupOptions& options, const BackendSpec& spec) {
  const auto& device = options.device_id();
  if (device) {
    DDP_CHECK_VALUE(
        device->is_cuda() && device->has_index(), "device_id(): expected cuda:N, got ", *device,
        ". Give this rank's GPU, such as c10::Device(at::kCUDA, get_local_rank()).");
    DDP_CHECK_VALUE(
        backend_of_gpus(spec) != nullptr, "device_id(): expected backend nccl, got ",
        to_string(spec), ". Leave out device_id, or choose cpu:gloo,cuda:nccl.");
  }
  check_nccl_options(options.nccl());
}

ProcessGroup build_group(const ProcessGroupOptions& options) {
  return build_group(options, {}, options.timeout());
}

ProcessGroup build_group(
    const ProcessGroupOptions& options, GenerationOfJob generation,
    std::chrono::milliseconds limit) {
  initialize_logging();
  ignore_broken_pipes();
  const Deadline deadline(std::min(limit, options.timeout()));
  const auto environment = read_environment(process_variable);
  GroupRecipe recipe;
  const auto& backend = options.backend();
  recipe.backends = parse_backend(backend, /*gpus_are_usable=*/true);
  recipe.backends_required = !backend.empty();
  recipe.timeout = options.timeout();
  recipe.device_id = options.device_id();
  recipe.nccl = options.nccl();
  check_gpu_options(options, recipe.backends);
  const auto* const on_gpus = backend_of_gpus(recipe.backends);
  const auto met = rendezvous(options, environment, deadline);

  // A problem that only this rank may have is passed to the barrier, so that the others do not wait
  // for this rank.
  std::string problem;
  GpuAssignment gpu;
  try {
    check_built(recipe.backends);
    recipe.gloo_devices = choose_gloo_devices(environment, met.host);
    // Finding GPUs loads the CUDA driver, so it is skipped if Gloo was chosen.
    if (on_gpus != nullptr) gpu = on_gpus->find_gpu(environment.local_rank, recipe.device_id);
  } catch (const c10::Error& error) {
    problem = text_of(error);
  }
  const auto claim = ddp::str(
      "world size ", met.world_size, " and ",
      backend.empty() ? "the default backend" : "backend " + to_string(recipe.backends));
  auto startup = make_startup_point(met, deadline);
  std::string name;
  while (name.empty()) {
    try {
      name = run_startup_barrier(startup.barrier, claim, problem);
    } catch (const EarlyLossError& lost) {
      // The store was an earlier group's, or rank 0 restarts: the new store has the same address.
      if (met.hosting_rank < 0) throw;
      const auto without = problem_of([&] {
        startup = make_startup_point(rendezvous(options, environment, deadline), deadline);
      });
      DDP_CHECK(without.empty(), without, " Before that, ", text_of(lost));
    }
  }
  const auto& barrier = startup.barrier;
  const auto own_store = startup.store->with_prefix(name);
  bool uses_gpus = on_gpus != nullptr;
  if (uses_gpus) {
    const auto votes = own_store->with_prefix("votes")->with_deadline(deadline);
    uses_gpus = all_have_gpus(barrier, *votes, gpu, backend.empty() ? "" : on_gpus->name);
    recipe.backends = parse_backend(backend, uses_gpus);
    if (!uses_gpus) recipe.device_id.reset();
  }

  recipe.world_ranks.resize(static_cast<size_t>(met.world_size));
  std::iota(recipe.world_ranks.begin(), recipe.world_ranks.end(), 0);
  return connect_all(barrier, [&] {
    if (uses_gpus && gpu.device) on_gpus->use_gpu(*gpu.device);
    recipe.job =
        start_job_monitor(met, own_store, recipe.gloo_devices, deadline, std::move(generation));
    return connect_group(recipe, deadline, own_store, met.rank, "default_pg", /*key=*/"");
  });
}

}  // namespace ddp
