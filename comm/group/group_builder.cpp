#include "group/group_builder.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <thread>

#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>

#include "backends/gpu_assignment.h"
#include "backends/registry.h"
#include "group/monitored_group.h"
#include "rendezvous/rendezvous.h"
#include "store/bounded_store.h"
#include "store/startup_barrier.h"

namespace ddp {
namespace {

constexpr auto kReportGrace = std::chrono::seconds(2);

using backends::BackendPtr;
using StorePtr = c10::intrusive_ptr<BoundedStore>;

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
  StorePtr store;
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
StorePtr open_another_connection(const StorePtr& store, const Deadline& deadline) {
  StorePtr another;
  problem_of([&] { another = bounded(store->with_deadline(deadline)->clone()); });
  return another ? another : store;
}

// Connects the backends of a group after all its members have arrived.
ProcessGroup connect(
    const GroupRecipe& recipe, const Deadline& deadline, const StorePtr& store,
    const StorePtr& monitor_store, int rank, const std::string& name) {
  const int size = static_cast<int>(recipe.world_ranks.size());
  const auto group = OwnedProcessGroup::make<MonitoredGroup>(store, rank, size);
  std::map<std::string, BackendPtr> made;
  // c10d uses it for calls without a tensor: as in Python, the backend of the GPUs if there is one.
  std::string default_backend;
  for (const auto& [device, backend] : recipe.backends) {
    const auto& description = *backends::find(backend);
    auto& instance = made[backend];
    if (!instance) {
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
           recipe.backends_required});
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
  group->start_monitor(recipe, monitor_store->with_prefix("monitor"));
  return group;
}

using Monitor = std::shared_ptr<GroupMonitor>;

// Runs a startup barrier of a group that may have failed: then not all of its ranks take part, and
// the waiting rank throws the group's failure. The thread that runs the barrier is detached, and
// ends soon after.
std::string run_barrier_in_group(
    const Monitor& monitor, StartupBarrier barrier, const std::string& claim,
    const std::string& problem = "") {
  if (!monitor || barrier.world_size == 1) return run_startup_barrier(barrier, claim, problem);
  barrier.cancelled = std::make_shared<std::atomic<bool>>(false);
  const auto give_up = c10::make_scope_exit([&] { *barrier.cancelled = true; });
  auto name = std::make_shared<std::promise<std::string>>();
  auto called = name->get_future();
  std::thread([name, barrier, claim, problem] {
    try {
      name->set_value(run_startup_barrier(barrier, claim, problem));
    } catch (...) {
      name->set_exception(std::current_exception());
    }
  }).detach();
  monitor->wait_until(
      [&](std::chrono::milliseconds at_most) {
        return called.wait_for(at_most) == std::future_status::ready;
      },
      [&] { return barrier.subject; });
  return called.get();
}

// Waits until every rank of the barrier has connected its backends. The store must exist until
// then, and may be in the process of a rank that is done, or that had nothing to connect.
ProcessGroup connect_all(
    StartupBarrier barrier, const Monitor& monitor,
    const std::function<ProcessGroup()>& connect_own) {
  ProcessGroup group;
  const auto problem = problem_of([&] { group = connect_own(); });
  // Ranks that fail at the deadline need time to report it.
  barrier.deadline = barrier.deadline.and_then(kReportGrace);
  run_barrier_in_group(monitor, barrier, "connected", problem);
  return group;
}

std::string to_text(const std::vector<int>& ranks) { return '[' + joined_by(", ", ranks) + ']'; }

void check_ranks(const std::vector<int>& sorted, const c10d::ProcessGroup& parent) {
  const auto text = to_text(sorted);
  const auto place = on_rank_text(parent);
  const int world_size = parent.getSize();
  DDP_CHECK_VALUE(
      !sorted.empty(), "new_group: expected at least one rank, got none ", place,
      ". List the members, the same on all ranks.");
  for (size_t i = 0; i < sorted.size(); ++i) {
    DDP_CHECK_VALUE(
        sorted[i] >= 0 && sorted[i] < world_size,
        "new_group: expected ranks of the parent group, 0 to ", world_size - 1, ", got ", sorted[i],
        " in ", text, " ", place, ". Leave out what is not one of them.");
    DDP_CHECK_VALUE(
        i == 0 || sorted[i] != sorted[i - 1], "new_group: expected each rank once, got ", sorted[i],
        " twice in ", text, " ", place, ". List it once.");
  }
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

ProcessGroup build_group(const ProcessGroupOptions& options) {
  initialize_logging();
  ignore_broken_pipes();
  const Deadline deadline(options.timeout());
  const auto environment = read_environment(process_variable);
  GroupRecipe recipe;
  const auto& backend = options.backend();
  recipe.backends = parse_backend(backend, /*gpus_are_usable=*/true);
  recipe.backends_required = !backend.empty();
  recipe.timeout = options.timeout();
  const auto* const on_gpus = backend_of_gpus(recipe.backends);
  const auto met = rendezvous(options, environment, deadline);
  recipe.store_host = met.hosting_rank;

  // A problem that only this rank may have is passed to the barrier, so that the others do not wait
  // for this rank.
  std::string problem;
  GpuAssignment gpu;
  try {
    check_built(recipe.backends);
    recipe.gloo_devices = choose_gloo_devices(environment, met.host);
    // Finding GPUs loads the CUDA driver, so it is skipped if Gloo was chosen.
    if (on_gpus != nullptr) gpu = on_gpus->find_gpu(environment.local_rank);
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
  }

  recipe.world_ranks.resize(static_cast<size_t>(met.world_size));
  std::iota(recipe.world_ranks.begin(), recipe.world_ranks.end(), 0);
  return connect_all(barrier, /*monitor=*/nullptr, [&] {
    if (uses_gpus && gpu.device) on_gpus->use_gpu(*gpu.device);
    recipe.monitor_store =
        met.world_size > 1 ? open_another_connection(own_store, deadline) : own_store;
    return connect(recipe, deadline, own_store, recipe.monitor_store, met.rank, "default_pg");
  });
}

namespace {

const GroupRecipe& recipe_of(const char* call, const ProcessGroup& parent) {
  const auto* made_here = dynamic_cast<const MonitoredGroup*>(parent.get());
  DDP_CHECK(
      made_here, call, ": expected a group that this library made, got another one ",
      on_rank_text(*parent),
      ". Use one that init_process_group, make_process_group, new_group or split_group made.");
  return made_here->recipe();
}

// Makes groups of ranks of a parent. All its ranks meet in a startup barrier, then the members of
// each group connect.
class SubgroupBuilder {
 public:
  /// \param claim  has to be the same on all ranks of the parent.
  SubgroupBuilder(const char* call, const ProcessGroup& parent, const std::string& claim)
      : parent_(parent),
        recipe_(recipe_of(call, parent)),
        deadline_(recipe_.timeout),
        store_(bounded(parent->getStore())->with_prefix(call)),
        monitor_store_(recipe_.monitor_store ? recipe_.monitor_store->with_prefix(call) : store_),
        barrier_{store_, parent->getRank(), parent->getSize(), deadline_, call},
        monitor_(own_monitor_of(*parent)),
        name_(run_barrier_in_group(monitor_, barrier_, claim)) {}

  /// Returns the texts of all ranks of the parent, by rank.
  std::vector<std::string> exchange(const std::string& own) const {
    const auto store = store_->with_prefix(name_)->with_deadline(deadline_);
    std::vector<std::string> keys, texts;
    for (int rank = 0; rank < parent_->getSize(); ++rank) keys.push_back(ddp::str("from/", rank));
    store->set(keys[static_cast<size_t>(parent_->getRank())], {own.begin(), own.end()});
    // Not multiGet(), which would wait for a rank that has failed.
    constexpr std::chrono::milliseconds kPollInterval(2);
    const auto are_there = [&](std::chrono::milliseconds at_most) {
      if (store->check(keys)) return true;
      std::this_thread::sleep_for(std::min(at_most, kPollInterval));
      return false;
    };
    monitor_->wait_until(are_there, [this] { return barrier_.subject; });
    for (const auto& value : store->multiGet(keys)) texts.emplace_back(value.begin(), value.end());
    return texts;
  }

  /// Returns an empty group if this rank is not among `ranks`.
  ///
  /// \param ranks  the members' ranks in the parent, in the new group's order.
  /// \param suffix  of the group's store keys; differs between groups that are made together.
  ProcessGroup connect_members(const std::vector<int>& ranks, const std::string& suffix) const {
    return connect_all(barrier_, monitor_, [&]() -> ProcessGroup {
      const auto own = std::find(ranks.begin(), ranks.end(), parent_->getRank());
      if (own == ranks.end()) return {};
      auto recipe = recipe_;
      recipe.world_ranks.clear();
      for (const int rank : ranks) {
        recipe.world_ranks.push_back(recipe_.world_ranks[static_cast<size_t>(rank)]);
      }
      return connect(
          recipe, deadline_, store_->with_prefix(name_ + suffix),
          monitor_store_->with_prefix(name_ + suffix), static_cast<int>(own - ranks.begin()),
          "group " + to_text(recipe.world_ranks));
    });
  }

 private:
  const ProcessGroup parent_;
  const GroupRecipe recipe_;
  const Deadline deadline_;
  const StorePtr store_, monitor_store_;
  const StartupBarrier barrier_;
  const Monitor monitor_;
  const std::string name_;  // random, of this barrier
};

}  // namespace

ProcessGroup build_subgroup(const ProcessGroup& parent, const std::vector<int>& ranks) {
  auto sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  check_ranks(sorted, *parent);
  return SubgroupBuilder("new_group", parent, to_text(sorted)).connect_members(sorted, "");
}

ProcessGroup build_split(const ProcessGroup& parent, int color, int key) {
  DDP_CHECK_VALUE(
      color >= -1, "split_group: expected a color of at least -1, got ", color, " ",
      on_rank_text(*parent), ". Give ranks of one group the same number, and -1 for no group.");
  SubgroupBuilder builder("split_group", parent, "");
  std::vector<std::pair<int, int>> members;  // key and rank
  const auto given = builder.exchange(ddp::str(color, " ", key));
  for (size_t rank = 0; rank < given.size(); ++rank) {
    int its_color = -1, its_key = 0;
    InputText(given[rank]) >> its_color >> its_key;
    if (color >= 0 && its_color == color) members.emplace_back(its_key, static_cast<int>(rank));
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [_, rank] : members) ranks.push_back(rank);
  return builder.connect_members(ranks, ddp::str("/", color));
}

}  // namespace ddp
