#include "elastic/run.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <c10/util/ScopeExit.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "elastic/recoverable.h"

namespace ddp {
namespace {

using Clock = std::chrono::steady_clock;

// A network that fails for a moment may end an attempt; an error of a rank ends all of them.
constexpr int64_t kAttemptsOfATurn = 5;

std::atomic<bool> leave_was_signalled{false};

void leave_on(const std::vector<int>& signals) {
  for (const int signal : signals) {
    DDP_CHECK_VALUE(
        std::signal(signal, [](int) { leave_was_signalled = true; }) != SIG_ERR,
        "ElasticOptions::leave_on(): expected signals that can be handled, got ", signal, ".");
  }
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int slot_of_environment() {
  const auto text = variable("DDP_SLOT");
  if (text.empty()) return -1;
  const bool is_number = text.size() < 10 && text.find_first_not_of("0123456789") == text.npos;
  DDP_CHECK_VALUE(
      is_number, "DDP_SLOT: expected a number from 0 on, got \"", text,
      "\". ddprun --elastic sets it; leave it out for any free slot.");
  return std::stoi(text);
}

ProcessGroupOptions checked_group(const ElasticOptions& options) {
  auto group = options.group_options();
  if (group.backend().empty()) group.backend("shm");
  const auto& backend = group.backend();
  const auto known = generation_backends(backend);
  DDP_CHECK_VALUE(
      known.carries_cpu, "ElasticOptions::group(): expected a backend for CPU tensors too, got \"",
      backend, "\". Ranks tell each other by it what they have: use cpu:gloo,cuda:nccl.");
  DDP_CHECK_VALUE(
      !known.picks_device || options.sets_default_group(),
      "ElasticOptions::sets_default_group(): expected true with backend \"", backend,
      "\", got false, as of ranks that are threads: each rank has a GPU of its own there. Run "
      "each rank in a process, by ddprun.");
  return group;
}

}  // namespace

Elastic::Impl::Impl(const ElasticOptions& given) : options(given) {
  const auto group_options = checked_group(options);
  leave_on(options.leave_on());
  DDP_CHECK_VALUE(
      options.snapshot_every() > 0, "ElasticOptions::snapshot_every(): expected 1 or more, got ",
      options.snapshot_every(), ".");
  auto coordinator = options.coordinator();
  if (coordinator.empty()) coordinator = variable("DDP_COORDINATOR");
  interrupted = Clock::now();
  if (coordinator.empty()) {
    set_group(
        options.sets_default_group() ? init_process_group(options.group_options())
                                     : make_process_group(options.group_options()));
    generation.rank = generation.slot = group->getRank();
    generation.size = group->getSize();
    has_state = true;
    return;
  }
  check_not_pretended("Elastic", "Start the job with ddprun --elastic, and without --pretend.");
  generations = std::make_unique<Generations>(
      Generations::Settings{coordinator, slot_of_environment(), group_options});
  generation.slot = generations->slot();
  // A generation's group is made on another thread. The meeting reports what a rank lacks.
  const auto no_device = take_own_device(group_options);
  while (!generations->joins() && !group) {
    form = generations->next({});
    if (!form || !form->sources.empty()) break;
    set_group(generations->meet(*form));
  }
  has_state = static_cast<bool>(group);
  if (has_state) {
    describe(*form);
    return;
  }
  DDP_CHECK(no_device.empty(), "Elastic: ", no_device);
  is_mirror = true;
  generation.rank = generation.slot;
  generation.size = std::max(generations->size(), generation.slot + 1);
  set_group(make_mirror_group(
      generation.rank, generation.size, group_options.timeout(), group_options.backend()));
}

Elastic::Impl::~Impl() {
  if (std::uncaught_exceptions() > 0) leave_by(nullptr);
  generations.reset();
  parts.clear();
  if (options.sets_default_group() && is_initialized() && default_group() == group) {
    const auto problem = problem_of([] { destroy_process_group(); });
    if (!problem.empty()) TORCH_WARN("Elastic: ", problem);
  }
}

void Elastic::Impl::set_group(ProcessGroup next) {
  if (!next) return;
  if (options.sets_default_group() && generations) replace_default_group(next);
  group = std::move(next);
}

HeldState Elastic::Impl::held() const {
  using Kind = HeldState::Kind;
  const bool is_torn = at == At::Apply && !goes_back_to_snapshots();
  const auto kind = !has_state ? Kind::None : is_torn ? Kind::Torn : Kind::Whole;
  return {kind, progress.steps, progress.turns, vote_text};
}

void Elastic::Impl::add(elastic::Part part) {
  DDP_CHECK(
      at == At::Start, "Elastic::add: expected to be called before the first turn, got \"",
      part.name(), "\" in one. Add all parts before loop().");
  for (const auto& other : parts) {
    DDP_CHECK_VALUE(
        other.name() != part.name(), "Elastic::add: expected a new name, got \"", part.name(),
        "\" again. Give each part its own.");
  }
  parts.push_back(std::move(part));
}

void Elastic::Impl::enter() {
  DDP_CHECK(at == At::Start, "Elastic: expected loop() or enter() once, got a second call.");
  at = At::Boundary;
  if (!generations) {
    if (checkpointer != nullptr) progress.steps = checkpointer->load_latest().value_or(0);
    saved_step = progress.steps;
    for (auto& part : parts) part.find_buffers();
    for (const auto& act : on_change) act(generation);
    return;
  }
  if (is_mirror) {
    enter_next();
    return;
  }
  try {
    begin_generation(*std::exchange(form, {}));
  } catch (...) {
    if (!can_recover_from(std::current_exception())) throw;
    enter_next();
  }
}

bool Elastic::Impl::can_recover_from(const std::exception_ptr& error) const {
  if (!generations || at == At::Left) return false;
  if (at == At::Apply && !goes_back_to_snapshots()) return false;
  return elastic::is_recoverable(error, *generations);
}

/// \return false: this process has left.
bool Elastic::Impl::enter_next() {
  for (;;) {
    if (!form) form = generations->next(held());
    if (!form) {
      at = At::Left;
      return false;
    }
    const auto next = *std::exchange(form, {});
    try {
      auto met = generations->meet(next);
      if (!met) continue;
      if (std::exchange(is_mirror, false)) end_mirror_group(group);
      set_group(std::move(met));
      describe(next);
      begin_generation(next);
      return true;
    } catch (...) {
      if (!can_recover_from(std::current_exception())) throw;
    }
  }
}

/// Ends the job on every rank where one turn fails again and again though no rank is lost: a rank
/// whose own error ends the others' wait, as of an optimizer that communicates, has it again in the
/// next generation. The coordinator counts losses.
void Elastic::Impl::check_failures(const GenerationForm& next) {
  const bool is_same_turn = next.applied == failures.steps && next.turns == failures.turns;
  const bool are_same_ranks = generation.lost.empty() && generation.joined.empty();
  if (!is_same_turn || !are_same_ranks) failures = {next.applied, next.turns, 0, ""};
  if (std::exchange(has_failed, false) && are_same_ranks) ++failures.times;
  // A rank may have been between two turns when the turn failed on another one.
  const auto most =
      all_reduce(at::full({1}, failures.times, at::kLong), c10d::ReduceOp::MAX, group);
  failures.times = most.item<int64_t>();
  if (failures.times == 1) failures.first = generation.why;  // which is the same on all
  if (failures.times < kAttemptsOfATurn) return;
  throw readable_error<QuorumLost>(
      DDP_HERE, ddp::str(
                    "Elastic: expected a turn that failed to end when it is repeated, got one "
                    "after step ",
                    next.applied, " that failed ", failures.times,
                    " times though no rank was lost; the first time: ", failures.first,
                    ". Repair the cause."));
}

/// Collective part of starting a generation.
void Elastic::Impl::begin_generation(const GenerationForm& next) {
  check_failures(next);
  take_state(next);
  device_end.find(group, parts);
  for (auto& part : parts) part.find_buffers();
  if (options.verify()) elastic::verify_equal(group, parts);
  if (goes_back_to_snapshots()) snapshots.take(group, parts, progress);
  generation.steps = progress.steps;
  generation.repeated = std::exchange(repeated, 0);
  generation.seconds = std::chrono::duration<double>(Clock::now() - interrupted).count();
  for (const auto& act : on_change) act(generation);
  generations->entered();
}

void Elastic::Impl::take_state(const GenerationForm& next) {
  if (!next.sources.empty()) return take_state_of_others(next);
  if (next.number > 1) rebind_parts();
  load_checkpoint(/*has_to=*/false);
  has_state = true;
}

void Elastic::Impl::take_state_of_others(const GenerationForm& next) {
  const bool is_sharded = goes_back_to_snapshots();
  const bool joins = !has_state;  // and repeats nothing
  auto steps = progress.steps;
  const auto count_repeated = [&] {
    if (!joins) repeated += std::max<int64_t>(steps - progress.steps, 0);
    steps = std::min(steps, progress.steps);
  };
  const bool are_shards_kept = is_sharded && snapshots.choose(group);
  if (are_shards_kept) snapshots.go_back(parts, progress);
  count_repeated();
  const bool is_behind = progress.steps < next.applied || progress.turns < next.turns;
  elastic::exchange_state(group, next, joins || (is_behind && !is_sharded), parts, progress);
  has_state = true;
  rebind_parts();
  if (is_sharded) settle_shards(are_shards_kept);
  count_repeated();
}

/// \param has_to  whether there must be one.
void Elastic::Impl::load_checkpoint(bool has_to) {
  const auto loaded = checkpointer == nullptr ? std::nullopt : checkpointer->load_latest();
  if (has_to && !loaded) {
    throw readable_error<QuorumLost>(
        DDP_HERE,
        "Elastic: expected each rank's part of a ZeroRedundancyOptimizer on a rank that is left, "
        "got none of some: a rank was lost, and the rank that keeps a copy of its part at once, "
        "and there is no checkpoint. Use Elastic::checkpoints().");
  }
  progress.steps = progress.turns = saved_step = loaded.value_or(0);
  progress.turns_of_step = 0;
}

bool Elastic::Impl::goes_back_to_snapshots() const {
  const auto is_sharded = [](const elastic::Part& part) { return part.sharded() != nullptr; };
  return generations && any_of(parts, is_sharded);
}

bool Elastic::Impl::is_snapshot_due() const {
  // The first step decides the order of the buckets, by which a backend may add up otherwise.
  const bool is_first = snapshots.steps() == 0 && progress.steps > 0;
  return is_first || progress.steps >= snapshots.steps() + options.snapshot_every();
}

/// After the parts were cut over the new group, which dropped their state.
void Elastic::Impl::settle_shards(bool are_kept) {
  if (are_kept) return snapshots.redistribute_shards(group, parts);
  // At the start there is no state yet.
  if (progress.steps > 0) load_checkpoint(/*has_to=*/true);
}

void Elastic::Impl::rebind_parts() {
  using Follows = elastic::Part::Follows;
  for (const auto when : {Follows::First, Follows::AsModule, Follows::AfterModules}) {
    for (auto& part : parts) {
      if (part.follows() == when) part.rebind(group);
    }
  }
  if (checkpointer == nullptr) return;
  checkpointer->rebind(group);
  saved_step = 0;
}

void Elastic::Impl::describe(const GenerationForm& next) {
  const auto has = [](const auto& all, auto one) { return contains(all, one); };
  ElasticGeneration now;
  now.number = next.number;
  now.rank = next.rank;
  now.size = static_cast<int>(next.slots.size());
  now.slot = next.slots[static_cast<size_t>(next.rank)];
  now.slots = next.slots;
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (!has(next.processes, processes[rank])) now.lost.push_back(generation.slots[rank]);
  }
  for (size_t rank = 0; rank < next.processes.size(); ++rank) {
    if (!has(processes, next.processes[rank])) now.joined.push_back(next.slots[rank]);
  }
  now.why = generations->why();
  processes = next.processes;
  generation = std::move(now);
}

void Elastic::Impl::undo_turn() {
  for (auto& part : parts) part.undo();
  at = At::Boundary;
}

/// Waits for the end of a turn on the devices. \return false: the turn failed there.
bool Elastic::Impl::has_ended_on_devices() {
  if (device_end.is_none() || (at != At::Turn && at != At::Stepped)) return true;
  try {
    device_end.wait(group);
    return true;
  } catch (...) {
    if (!can_recover_from(std::current_exception())) throw;
    return false;
  }
}

void Elastic::Impl::end_turn() {
  if (at != At::Turn && at != At::Stepped) return;
  ++progress.turns;
  progress.turns_of_step = at == At::Stepped ? 0 : progress.turns_of_step + 1;
  at = At::Boundary;
}

void Elastic::Impl::recover() {
  DDP_CHECK(
      at != At::Apply || goes_back_to_snapshots(),
      "Elastic::recover: expected a state that is whole, got a step that threw, ",
      "which left it torn. Let this process end: another one takes its place.");
  DDP_CHECK(
      generations && at != At::Start, "Elastic::recover: expected a turn of an elastic job, got ",
      generations ? "a call before enter()" : "a world that is fixed", ".");
  interrupted = Clock::now();
  has_failed = true;
  vote_text = elastic::text_of_vote(std::current_exception());
  if (at == At::Turn || at == At::Apply) {
    undo_turn();
    repeated = 1;
  } else if (at == At::Stepped && !device_end.is_none()) {
    // The turn's rest may have used what an aborted collective has left on a device.
    for (auto& part : parts) part.undo();
  }
  end_turn();
  enter_next();
  vote_text.clear();
}

/// Whether this rank stands at this boundary for a planned change. With parts that are cut all
/// ranks do, or none: they take a snapshot together.
bool Elastic::Impl::pauses_for_change() {
  const bool is_wanted = generations->change_is_wanted();
  if (!goes_back_to_snapshots()) return is_wanted;
  const auto by_any =
      all_reduce(at::full({1}, is_wanted ? 1 : 0, at::kLong), c10d::ReduceOp::MAX, group);
  return by_any.item<int64_t>() != 0;
}

bool Elastic::Impl::begin_turn() {
  const bool in_turn = at == At::Turn || at == At::Apply || at == At::Stepped;
  if (generations && in_turn && (generations->has_thrown() || !has_ended_on_devices())) {
    // The turn swallowed the exception, or was over before its device was.
    recover();
  }
  DDP_CHECK(
      at != At::Start && at != At::Apply,
      "Elastic::begin_turn: expected enter() before it, and no step that threw.");
  end_turn();
  if (leave_was_signalled) leave();
  while (generations && at == At::Boundary) {
    const bool ended = generations->has_ended();
    if (!ended && !pauses_for_change()) break;
    interrupted = Clock::now();
    if (!ended) {
      if (goes_back_to_snapshots()) snapshots.take(group, parts, progress);
      generations->pause();
    }
    enter_next();
  }
  if (at == At::Left) return false;
  if (goes_back_to_snapshots() && is_snapshot_due()) snapshots.take(group, parts, progress);
  if (checkpointer != nullptr && progress.steps != saved_step) {
    checkpointer->maybe_save(progress.steps);
    saved_step = progress.steps;
  }
  for (auto& part : parts) part.note();
  seed_generators();
  at = At::Turn;
  return true;
}

void Elastic::Impl::seed_generators() const {
  if (options.seed() < 0) return;
  uint64_t seed = 0;
  for (const int64_t word :
       {options.seed(), static_cast<int64_t>(generation.slot), progress.steps,
        progress.turns_of_step}) {
    seed = mixed(seed, static_cast<uint64_t>(word) + 1);
  }
  auto devices = device_end.devices();
  devices.emplace_back(at::kCPU);
  for (const auto device : devices) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

void Elastic::Impl::step(const std::function<void()>& apply) {
  DDP_CHECK(
      at == At::Turn, "Elastic::step: expected one step in a turn, got ",
      at == At::Stepped ? "a second one" : "a call outside of a turn",
      ". Models that alternate take turns: run.steps() % 2.");
  if (generations && generations->has_thrown()) {
    throw readable_error<RankLost>(
        DDP_HERE, ddp::str("Elastic::step: ", generations->why(), ". The turn is repeated."));
  }
  device_end.wait(group);
  at = At::Apply;
  const OptimizerTime::Scope time;
  apply();
  at = At::Stepped;
  ++progress.steps;
  if (device_end.is_none()) return;
  for (auto& part : parts) part.note();  // the turn's rest may fail on a device
}

/// \return false: other ranks need this rank's state.
bool Elastic::Impl::finish() {
  DDP_CHECK(at != At::Start && at != At::Apply, "Elastic::finish: expected enter() before it.");
  if (at == At::Turn) undo_turn();
  end_turn();
  if (checkpointer != nullptr) checkpointer->wait();
  if (!generations || at == At::Left) return true;
  if (generations->has_ended()) return false;
  generations->done();
  return generations->wait_until_all_are_done();
}

void Elastic::Impl::leave() {
  if (generations) generations->leave();
}

void Elastic::Impl::leave_by(const std::exception_ptr& error) noexcept {
  try {
    if (!generations || at == At::Left) return;
    const auto why = error ? text_of(error) : "an exception ended its part in the training";
    generations->threw(progress.steps, why);
    at = At::Left;
  } catch (const std::exception&) {
    // The connection ends with this process.
  }
}

}  // namespace ddp
