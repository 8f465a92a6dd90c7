#include "group_builder.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <ddp/error_text.h>

#include "backends/backends.h"
#include "bounded_store.h"
#include "collective_checks.h"
#include "own_gpu.h"
#include "rendezvous.h"
#include "roll_call.h"

namespace ddp {
namespace {

constexpr auto kLastWords = std::chrono::seconds(2);

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

BackendPtr connect_gloo(const backends::Setup& setup, const GlooDevices& devices) {
  const auto gloo = std::make_shared<BackendPtr>();
  const auto problem = problem_of([&] {
    bounded(setup.store)->run([gloo, devices, own = setup](const auto& store) mutable {
      own.store = store;
      *gloo = backends::make_gloo(own, devices);
    });
  });
  TORCH_CHECK(
      *gloo, "Gloo: expected rank ", setup.rank, " of ", setup.world_size,
      " to connect to the others over ", to_string(devices), " within ",
      setup.connect_by.timeout().count(),
      " ms, but it could not. If that is not the way to them, set GLOO_SOCKET_IFNAME. (", problem,
      ")");
  return *gloo;
}

using StorePtr = c10::intrusive_ptr<BoundedStore>;

// C++ programs print errors only, unless c10 is told to read TORCH_CPP_LOG_LEVEL.
void initialize_logging() {
  static const bool once = [] {
    if (process_variable("TORCH_CPP_LOG_LEVEL")) c10::initLogging();
    return true;
  }();
  (void)once;
}

// What `backend("")` came to decides how fast the job is.
void log_choice(const backends::Setup& setup, const backends::Shared& shared) {
  if (setup.global_ranks[static_cast<size_t>(setup.rank)] != 0) return;
  LOG(INFO) << setup.group_name << ": backend(\"\") chose \"" << (shared.backend ? "shm" : "gloo")
            << "\" for CPU tensors" << (shared.backend ? "." : ", for " + shared.why_not + ".");
}

BackendPtr make_shm_or_gloo(const World& world, const backends::Setup& setup) {
  const auto gloo = connect_gloo(setup, world.gloo_devices);
  if (setup.world_size == 1 && !world.backends_required) return gloo;
  const auto shared = backends::make_shm(setup, gloo, [&](const backends::Setup& leaders) {
    return connect_gloo(leaders, world.gloo_devices);
  });
  TORCH_CHECK(
      shared.backend || !world.backends_required,
      "backend shm: expected ranks of a host to map each other's memory, but ", shared.why_not,
      ". Start at least two of them on one host and in one container as one user, or use "
      "backend(\"gloo\").");
  if (!world.backends_required) log_choice(setup, shared);
  return shared.backend ? shared.backend : gloo;
}

// \param setup  its store is still missing.
BackendPtr make_backend(
    const std::string& name, const World& world, const StorePtr& store, backends::Setup setup) {
  setup.store = store;
  // NCCL connects, and asks the store, in the first collective.
  if (name == "nccl") return backends::make_nccl(setup);
  setup.store = store->by(setup.connect_by);
  if (name == "shm") return make_shm_or_gloo(world, setup);
  return connect_gloo(setup, world.gloo_devices);
}

// Connects the backends of a group whose members have all come.
ProcessGroup connect(
    const World& world, const Deadline& deadline, const StorePtr& store, int rank,
    const std::vector<int>& global_ranks, const std::string& name) {
  const int size = static_cast<int>(global_ranks.size());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  std::map<std::string, BackendPtr> made;
  std::string cpu_backend = "gloo";
  for (const auto& [device, backend] : world.backends) {
    auto& instance = made[backend];
    if (!instance) {
      instance = make_backend(
          backend, world, store->within(backend),
          {{},
           rank,
           size,
           world.timeout,
           deadline,
           name,
           {global_ranks.begin(), global_ranks.end()},
           ""});
      instance->setSequenceNumberForGroup();
    }
    group->setBackend(
        c10::Device(device).type(),
        c10d::ProcessGroup::strToBackendType(instance->getBackendName()), instance);
    if (device == "cpu") cpu_backend = instance->getBackendName();
  }
  // c10d asks the default backend for what belongs to no tensor; as Python does, NCCL if it is in.
  group->setDefaultBackend(is_used(world.backends, "nccl") ? "nccl" : cpu_backend);
  group->setGroupName(name);
  group->setGroupDesc(name);
  return group;
}

// Waits until every rank of the roll has connected what it had to. The store has to live until
// then, and may be in the process of a rank that is done, or that had nothing to connect.
ProcessGroup connect_all(RollCall roll, const std::function<ProcessGroup()>& connect_own) {
  ProcessGroup group;
  const auto problem = problem_of([&] { group = connect_own(); });
  // Those that fail at the deadline still have to say so.
  roll.deadline = roll.deadline.and_then(kLastWords);
  call_roll(roll, "connected", problem);
  return group;
}

std::string to_text(const std::vector<int>& ranks) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < ranks.size(); ++i) text << (i > 0 ? ", " : "") << ranks[i];
  text << ']';
  return text.str();
}

void check_ranks(const std::vector<int>& sorted, const c10d::ProcessGroup& parent) {
  const auto text = to_text(sorted);
  const auto place = place_of(parent);
  const int world_size = parent.getSize();
  TORCH_CHECK_VALUE(
      !sorted.empty(), "new_group: expected at least one rank, got none ", place,
      ". List the members, the same on all ranks.");
  for (size_t i = 0; i < sorted.size(); ++i) {
    TORCH_CHECK_VALUE(
        sorted[i] >= 0 && sorted[i] < world_size,
        "new_group: expected ranks of the default group, 0 to ", world_size - 1, ", got ",
        sorted[i], " in ", text, " ", place, ". Leave out what is not one of them.");
    TORCH_CHECK_VALUE(
        i == 0 || sorted[i] != sorted[i - 1], "new_group: expected each rank once, got ", sorted[i],
        " twice in ", text, " ", place, ". List it once.");
  }
}

}  // namespace

int local_rank_of(const Environment& environment, int world_size) {
  if (environment.local_rank) return parse_int(*environment.local_rank, {0}, kLauncherRemedy);
  TORCH_CHECK(
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

BuiltGroup build_group(const ProcessGroupOptions& options) {
  initialize_logging();
  const Deadline deadline(options.timeout());
  const auto environment = read_environment(process_variable);
  BuiltGroup built;
  auto& world = built.world;
  const auto& backend = options.backend();
  world.backends = parse_backend(backend, /*nccl_is_usable=*/true);
  world.backends_required = !backend.empty();
  world.timeout = options.timeout();
  const auto met = rendezvous(options, environment, deadline);

  // What only this rank may find wrong goes to the roll call, or the others would wait for it.
  std::string problem;
  OwnGpu gpu;
  try {
    check_built(world.backends);
    world.gloo_devices = choose_gloo_devices(environment, met.host);
    // Looking for GPUs loads the CUDA driver: not for those who chose Gloo.
    if (is_used(world.backends, "nccl")) gpu = backends::find_gpu(environment.local_rank);
  } catch (const c10::Error& error) {
    problem = text_of(error);
  }
  const auto store = BoundedStore(met.store, met.store_host).within("ddp");
  const RollCall roll{
      store->within("init"), met.rank, met.world_size, deadline, "init_process_group"};
  const auto claim = c10::str(
      "world size ", met.world_size, " and ",
      backend.empty() ? "the default backend" : "backend " + to_string(world.backends));
  const auto name = call_roll(roll, claim, problem);
  const auto own_store = store->within(name);
  if (is_used(world.backends, "nccl")) {
    const auto votes = own_store->within("votes")->by(deadline);
    const bool all = all_have_gpus(roll, *votes, gpu, /*required=*/!backend.empty());
    world.backends = parse_backend(backend, all);
  }

  std::vector<int> ranks(met.world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  built.group = connect_all(roll, [&] {
    if (is_used(world.backends, "nccl") && gpu.device) backends::use_cuda_device(*gpu.device);
    return connect(world, deadline, own_store, met.rank, ranks, "default_pg");
  });
  return built;
}

ProcessGroup build_subgroup(const BuiltGroup& parent, const std::vector<int>& ranks) {
  const int rank = parent.group->getRank();
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  check_ranks(sorted, *parent.group);

  const Deadline deadline(parent.world.timeout);
  const auto store = bounded(parent.group->getStore())->within("new_group");
  const RollCall roll{store, rank, parent.group->getSize(), deadline, "new_group"};
  const auto name = call_roll(roll, to_text(sorted));
  const auto place = std::find(sorted.begin(), sorted.end(), rank);
  return connect_all(roll, [&]() -> ProcessGroup {
    if (place == sorted.end()) return {};
    return connect(
        parent.world, deadline, store->within(name), static_cast<int>(place - sorted.begin()),
        sorted, c10::str("group ", to_text(sorted)));
  });
}

}  // namespace ddp
