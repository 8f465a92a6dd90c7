#include "group/group_builder.h"

#include <algorithm>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

#include "backends/gpu_assignment.h"
#include "backends/local_backend.h"
#include "backends/nccl/nccl.h"
#include "backends/registry.h"
#include "group/monitored_group.h"
#include "group/pretended_group.h"
#include "monitor/job_monitor.h"
#include "monitor/liveness_socket.h"
#include "pretend/pretend_backend.h"
#include "rendezvous/rendezvous.h"
#include "store/exchange.h"
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

/// Counts the lower ranks of this host, where no launcher gave a local rank.
///
/// All ranks say where they are, and rank 0 collects it, for others may have no local rank.
std::optional<int> count_on_host(
    const Rendezvous& met, const BoundedStorePtr& store, const std::optional<Setting>& local_rank) {
  const auto identity = host_identity();
  std::vector<std::string> keys;
  for (int rank = 0; rank < met.world_size; ++rank) keys.push_back(ddp::str("host/", rank));
  if (local_rank && met.rank != 0) {
    store->set(keys[static_cast<size_t>(met.rank)], {identity.begin(), identity.end()});
    return std::nullopt;
  }
  const auto hosts = exchange(*store, keys, met.rank, identity, store->getTimeout());
  if (local_rank || identity.empty()) return std::nullopt;
  return static_cast<int>(std::count(hosts.begin(), hosts.begin() + met.rank, identity));
}

/// The GPU that this process would use with the backend, or why it cannot.
GpuAssignment find_gpu(
    const DevicePicker& picker, const std::optional<Setting>& local_rank,
    const std::optional<c10::Device>& device_id) {
  const auto& backend = *picker.backend;
  if (!backend.why_unusable.empty()) return {backend.why_unusable, {}, ""};
  auto gpu = choose_gpu(local_rank, visible_devices(picker.device), device_id, picker.device);
  if (gpu.device && backend.device_id != nullptr) gpu.id = backend.device_id(*gpu.device);
  return gpu;
}

/// Where there is one: else the program selects it.
void make_current(const DevicePicker& picker, const GpuAssignment& gpu) {
  if (!gpu.device) return;
  const auto index = static_cast<c10::DeviceIndex>(*gpu.device);
  c10::impl::VirtualGuardImpl(picker.device).setDevice({picker.device, index});
}

using BackendType = c10d::ProcessGroup::BackendType;

// c10d keeps one backend of a type in a group, and gives a second one's device the first without a
// word. All names that it does not know have the type CUSTOM.
BackendType free_backend_type(const std::string& name, std::set<BackendType>& used) {
  using Type = BackendType;
  // NCCL last: c10d takes a group of that type for one of GPUs.
  for (const auto type :
       {c10d::ProcessGroup::strToBackendType(name), Type::CUSTOM, Type::UCC, Type::XCCL, Type::MPI,
        Type::GLOO, Type::NCCL}) {
    if (type != Type::UNDEFINED && used.insert(type).second) return type;
  }
  DDP_CHECK_VALUE(
      false, "backend(): expected up to 6 different backends in one group, got \"", name,
      "\" as one more. Make a second group for it.");
}

/// \param picker  the backend that takes a GPU for each rank, if there is one.
void check_gpu_options(
    const ProcessGroupOptions& options, const std::optional<DevicePicker>& picker) {
  const auto& device = options.device_id();
  if (device) {
    DDP_CHECK_VALUE(
        device->is_cuda() && device->has_index(), "device_id(): expected cuda:N, got ", *device,
        ". Give this rank's GPU, such as c10::Device(at::kCUDA, get_local_rank()).");
    DDP_CHECK_VALUE(
        picker && picker->device == c10::kCUDA, "device_id(): expected backend nccl, got ",
        to_string(parse_backend(options.backend(), /*gpus_are_usable=*/true)),
        ". Leave out device_id, or choose cpu:gloo,cuda:nccl.");
  }
  check_nccl_options(options.nccl());
}

/// How the ranks of these options meet: without an address, ranks that MPI has started ask MPI.
ProcessGroupOptions resolved(const ProcessGroupOptions& options, const Environment& environment) {
  const auto& backend = options.backend();
  const bool has_mpi = backend == "mpi" ||
                       (backend.size() > 4 && (backend + ',').find(":mpi,") != std::string::npos);
  const bool says_where = options.store() || options.init_method() != "env://" ||
                          process_variable("MASTER_ADDR") || environment.no_launcher;
  if (!has_mpi || says_where || mpi_meeting() == nullptr) return options;
  return ProcessGroupOptions(options).init_method("mpi://");
}

/// The settings that the backends need alike on all ranks: ", " before each.
std::string claims_of(const BackendSpec& backends) {
  std::set<std::string> claims;
  for (const auto& [device, name] : backends) {
    const auto* description = backends::find(name);
    if (description && description->claim) claims.insert(description->claim());
  }
  std::string text;
  for (const auto& claim : claims) text += claim.empty() ? "" : ", " + claim;
  return text;
}

}  // namespace

int local_rank_of(
    const Environment& environment, int world_size, const std::optional<int>& counted) {
  if (environment.local_rank) return parse_int(*environment.local_rank, {0}, kLauncherRemedy);
  if (counted) return *counted;
  DDP_CHECK(
      world_size == 1,
      "get_local_rank: expected LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or "
      "SLURM_LOCALID in the environment, got none of them in a world of ",
      world_size,
      " ranks. Start the program with ddprun, torchrun, mpirun or srun, or set LOCAL_RANK.");
  return 0;
}

ProcessGroup connect_group(
    const GroupRecipe& recipe, const Deadline& deadline, const BoundedStorePtr& store, int rank,
    const std::string& name, const std::string& key, const ProcessGroup& parent,
    const std::vector<int>& parent_ranks) {
  const int size = static_cast<int>(recipe.world_ranks.size());
  const auto group = MonitoredGroup::make(store, rank, size);
  // A world of one has the backend that its user chose.
  const bool is_subgroup_of_one = size == 1 && recipe.job->size() > 1;
  if (is_subgroup_of_one && parent) sit_out_group(recipe, deadline, name, parent);
  struct Made {
    BackendPtr instance;
    BackendType type = BackendType::UNDEFINED;
  };
  std::map<std::string, Made> made;
  std::set<BackendType> types;
  // c10d uses it for calls without a tensor: as in Python, the backend of the GPUs if there is one.
  std::optional<BackendType> default_type;
  for (const auto& [device, backend] : recipe.backends) {
    const auto& description = *backends::find(backend);
    const auto device_type = device_type_of(device);
    auto& [instance, type] = made[backend];
    const bool is_new = instance == nullptr;
    if (!instance && is_subgroup_of_one) {
      instance = backends::make_single_rank_backend(backend, recipe.timeout);
    } else if (!instance) {
      const backends::Setup setup = {
          // The deadline limits connecting, which some do in the first collective.
          description.connects_late ? store->with_prefix(backend)
                                    : store->with_prefix(backend)->with_deadline(deadline),
          rank,
          size,
          recipe.timeout,
          deadline,
          name,
          {recipe.world_ranks.begin(), recipe.world_ranks.end()},
          recipe.gloo_devices,
          recipe.backends_required,
          parent ? parent->getBackend(device_type) : nullptr,
          parent_ranks,
          recipe.device_id,
          recipe.nccl};
      instance = recipe.pretended ? make_pretend_backend(recipe.pretended, setup, backend, key)
                                  : description.make(setup);
    }
    if (is_new) type = free_backend_type(instance->getBackendName(), types);
    group->setBackend(device_type, type, instance);
    if (description.is_own) group->set_registered_name(device_type, backend);
    if (!default_type || description.picks_device) default_type = type;
  }
  group->setDefaultBackend(default_type.value_or(BackendType::UNDEFINED));
  group->setGroupName(name);
  group->setGroupDesc(name);
  if (recipe.device_id) group->setBoundDeviceId(recipe.device_id);
  group->start_monitor(recipe, key);
  return group;
}

void sit_out_group(
    const GroupRecipe& recipe, const Deadline& deadline, const std::string& name,
    const ProcessGroup& parent) {
  if (recipe.pretended) return;
  std::set<std::string> done;
  for (const auto& [device, backend] : recipe.backends) {
    const auto& description = *backends::find(backend);
    if (!description.participate_as_non_member || !done.insert(backend).second) continue;
    backends::Setup setup;
    setup.rank = parent->getRank();
    setup.world_size = parent->getSize();
    setup.timeout = recipe.timeout;
    setup.connect_by = deadline;
    setup.group_name = name;
    setup.parent = parent->getBackend(device_type_of(device));
    setup.device_id = recipe.device_id;
    setup.nccl = recipe.nccl;
    description.participate_as_non_member(setup);
  }
}

std::string make_own_device_current(const ProcessGroupOptions& options) {
  std::string unknown;
  const auto picker = device_picker(parse_backend(options.backend(), true, &unknown));
  if (!unknown.empty() || !picker) return unknown;
  const auto environment = read_environment(process_variable);
  const auto gpu = find_gpu(*picker, environment.local_rank, options.device_id());
  if (gpu.why_not.empty()) make_current(*picker, gpu);
  return gpu.why_not;
}

ProcessGroup build_group(const ProcessGroupOptions& options) {
  return build_group(options, {}, options.timeout());
}

ProcessGroup build_group(
    const ProcessGroupOptions& given, GenerationOfJob generation, std::chrono::milliseconds limit) {
  initialize_logging();
  ignore_broken_pipes();
  const auto environment = read_environment(process_variable);
  if (auto own = read_pretended_rank(process_variable, given.rank(), given.world_size())) {
    return build_pretended_group(given, environment, *own);
  }
  auto options = resolved(given, environment);
  options.timeout(std::min(options.timeout(), Deadline::kLongest));
  const Deadline deadline(std::min(limit, options.timeout()));
  GroupRecipe recipe;
  const auto& backend = options.backend();
  // A problem that only this rank may have is passed to the barrier, so that the others do not wait
  // for this rank: a plugin that registers a backend may be missing here.
  std::string problem;
  recipe.backends = parse_backend(backend, /*gpus_are_usable=*/true, &problem);
  const bool is_unknown = !problem.empty();
  recipe.backends_required = !backend.empty();
  recipe.timeout = options.timeout();
  recipe.device_id = options.device_id();
  recipe.nccl = options.nccl();
  const auto picker = is_unknown ? std::nullopt : device_picker(recipe.backends);
  if (!is_unknown) check_gpu_options(options, picker);
  const auto met = rendezvous(options, environment, deadline);
  start_call_log(environment, met.rank, met.world_size);

  GpuAssignment gpu;
  try {
    if (!is_unknown) check_built(recipe.backends);
    recipe.gloo_devices = choose_gloo_devices(environment, met.host);
    // Finding GPUs loads the CUDA driver, so it is skipped if Gloo was chosen.
    if (picker) gpu = find_gpu(*picker, environment.local_rank, recipe.device_id);
  } catch (const c10::Error& error) {
    problem = text_of(error);
  }
  auto claim = ddp::str(
      "world size ", met.world_size, " and ",
      backend.empty() ? "the default backend" : "backend " + backend_claim(backend));
  if (!is_unknown) claim += claims_of(recipe.backends);
  if (splits_parent(recipe.nccl, recipe.device_id)) claim += ", groups that split";
  if (const auto options = nccl_claim(recipe.nccl); !options.empty()) claim += ", " + options;
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
    } catch (const c10::Error& error) {
      DDP_CHECK_VALUE(!is_unknown, text_of(error));  // as any other bad option
      throw;
    }
  }
  const auto& barrier = startup.barrier;
  const auto own_store = startup.store->with_prefix(name);
  bool uses_gpus = picker.has_value();
  if (uses_gpus) {
    const auto votes = own_store->with_prefix("votes")->with_deadline(deadline);
    uses_gpus = all_have_gpus(barrier, *votes, gpu, backend.empty() ? "" : picker->backend->name);
    recipe.backends = parse_backend(backend, uses_gpus);
    if (!uses_gpus) recipe.device_id.reset();
  }

  recipe.world_ranks = numbers_up_to(met.world_size);
  return connect_all(barrier, [&] {
    if (uses_gpus) make_current(*picker, gpu);
    if (met.world_size > 1) {
      recipe.local_rank =
          count_on_host(met, own_store->with_deadline(deadline), environment.local_rank);
    }
    recipe.job =
        start_job_monitor(met, own_store, recipe.gloo_devices, deadline, std::move(generation));
    return connect_group(recipe, deadline, own_store, met.rank, "default_pg", /*key=*/"");
  });
}

}  // namespace ddp
