#include <ddp/internal/membership/generations.h>

#include <netinet/in.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ddp/elastic_errors.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/environment.h"
#include "base/executor.h"
#include "base/socket_address.h"
#include "group/group_builder.h"
#include "group/monitored_group.h"
#include "membership/member_link.h"
#include "monitor/job_monitor.h"
#include "store/tcp_store.h"

namespace ddp {

/// Makes a generation's group on a thread of its own, so that the end of the generation ends the
/// wait for it: what connects waits for the ranks, and for their hosts, with limits of its own.
/// Then that thread is left to itself, and drops what it made.
class Meeting {
 public:
  using Make = std::function<ProcessGroup()>;

  /// Has run() look at `is_cancelled` again.
  void wake();

  /// \return  what `make` returned; empty once `is_cancelled`.
  /// \throws  the exception of `make`.
  ProcessGroup run(Make make, const std::function<bool()>& is_cancelled);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

namespace {

struct Outcome {
  bool is_there = false;
  ProcessGroup group;
  std::exception_ptr error;
};

uint16_t port_of(int socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  const auto port = address.ss_family == AF_INET6
                        ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                        : reinterpret_cast<const sockaddr_in&>(address).sin_port;
  return ntohs(port);
}

/// A TCPStore of this process, on a port that the kernel chooses.
///
/// \param host  that the other ranks reach it by; of a loopback address it listens on that alone.
/// \param address  set to "HOST:PORT".
c10::intrusive_ptr<c10d::Store> open_generation_store(
    const std::string& host, std::chrono::milliseconds timeout, std::string& address) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.port = 0;  // any: TCPStore's default may be that of the generation before
  auto listener = listen_on_loopback(host, 0);
  if (listener) {
    options.port = port_of(listener.get());
    options.masterListenFd = listener.release();
  }
  auto store = open_tcp_store(host, options);
  const bool is_ipv6 = host.find(':') != std::string::npos;
  address =
      (is_ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(tcp_store_of(*store)->getPort());
  return store;
}

using membership::Member;
using membership::MemberLink;
using std::chrono::milliseconds;
using Stage = Member::Stage;

// The coordinator's limit for the groups of a generation.
constexpr milliseconds kMeetWithin{30000};
// The coordinator sees the end of a process as soon as its peers do, and knows why it ended.
constexpr milliseconds kReasonWithin{200};
constexpr milliseconds kAnswerWithin{1000};

membership::Address checked_address(const std::string& text) {
  try {
    return membership::parse_address(text);
  } catch (const std::invalid_argument& error) {
    DDP_CHECK_VALUE(
        false, "ElasticOptions::coordinator(): ", error.what(),
        ". ddprun --elastic sets DDP_COORDINATOR.");
  }
}

membership::Holding holding_of(HeldState::Kind kind) {
  switch (kind) {
    case HeldState::Kind::None:
      return membership::Holding::None;
    case HeldState::Kind::Whole:
      return membership::Holding::Whole;
    case HeldState::Kind::Torn:
      break;
  }
  return membership::Holding::Torn;
}

GenerationForm form_of(const Member& member) {
  const auto& told = member.form();
  const std::unordered_set<membership::ProcessId> sources(told.sources.begin(), told.sources.end());
  GenerationForm form;
  form.number = told.generation;
  form.applied = told.applied;
  form.turns = told.turns;
  for (size_t rank = 0; rank < told.members.size(); ++rank) {
    const auto& place = told.members[rank];
    form.slots.push_back(place.slot);
    form.processes.push_back(place.id);
    if (place.id == member.id()) form.rank = static_cast<int>(rank);
    if (sources.count(place.id) > 0) form.sources.push_back(static_cast<int>(rank));
  }
  return form;
}

}  // namespace

void Meeting::wake() {
  { const std::lock_guard lock(state_->mutex); }
  state_->changed.notify_all();
}

ProcessGroup Meeting::run(Make make, const std::function<bool()>& is_cancelled) {
  const auto outcome = std::make_shared<Outcome>();
  Executor executor;
  executor.push([state = state_, outcome, make = std::move(make)] {
    Outcome made;
    made.error = exception_of([&] { made.group = make(); });
    {
      const std::lock_guard lock(state->mutex);
      made.is_there = true;
      std::swap(*outcome, made);
    }
    state->changed.notify_all();
  });
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return is_cancelled() || outcome->is_there; });
  if (!outcome->is_there) {
    lock.unlock();
    executor.close(Deadline::Milliseconds(0));
    return {};
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(outcome->group);
}

bool GenerationForm::is_source() const { return contains(sources, rank); }

struct Generations::Impl {
  explicit Impl(const Settings& settings)
      : group_options(settings.group),
        link(checked_address(settings.coordinator), settings.slot, [this](const std::string& why) {
          stop(why);
        }) {}

  /// Runs on the link's thread: ends what waits for the other ranks.
  void stop(const std::string& why) {
    const auto how = link.look([](const Member& member) {
      if (member.stage() != Stage::Over) return GenerationEnd::RankLost;
      return member.end().how == Member::Ending::Fenced ? GenerationEnd::Fenced
                                                        : GenerationEnd::QuorumLost;
    });
    ended_before = how == GenerationEnd::RankLost
                       ? link.look([](const Member& member) { return member.generation(); })
                       : std::numeric_limits<int64_t>::max();
    meeting.wake();
    if (const auto current = current_job()) current->end_generation(how, why);
  }

  std::shared_ptr<JobMonitor> current_job() const {
    const std::lock_guard lock(mutex);
    return job;
  }

  /// Waits for the coordinator's reason, or accuses the ranks that are to blame. On the thread of a
  /// collective that failed.
  std::string report_failure(
      const GenerationForm& form, const std::string& why, const FindBlamed& find_blamed) {
    const auto generation = form.number;
    const auto ended_with = [&](milliseconds at_most) -> std::optional<std::string> {
      const auto until = std::chrono::steady_clock::now() + at_most;
      std::optional<std::string> reason;
      link.wait_until(until, [&](const Member& member) {
        const bool is_asked = member.generation() != generation || member.stage() == Stage::Over;
        if (is_asked) reason = member.stage() == Stage::Over ? member.end().why : member.why();
        return is_asked;
      });
      return reason;
    };
    if (auto reason = ended_with(kReasonWithin)) return *reason;
    std::vector<membership::ProcessId> accused;
    const auto blamed = find_blamed ? find_blamed() : std::vector<int>();
    for (const int rank : blamed) accused.push_back(form.processes[static_cast<size_t>(rank)]);
    link.with([&](Member& member, Member::Time now) {
      member.lost(now, generation, std::move(accused), why);
    });
    return ended_with(kAnswerWithin).value_or(why);
  }

  /// The address that other ranks reach this process by. On the coordinator's own host a process
  /// may reach it by a loopback address. The coordinator knows where members of other hosts reach
  /// it; to the ranks of a launcher, its node 0 is MASTER_ADDR.
  std::string own_host() const {
    auto host = link.local_host();
    const bool is_loopback = host.empty() || membership::is_loopback_host(host);
    auto reached = link.look([](const Member& member) { return member.reached_at(); });
    if (is_loopback && !reached.empty()) return reached;
    const auto environment = read_environment(process_variable);
    if (is_loopback && environment.master_addr) return environment.master_addr->value;
    return host.empty() ? loopback_address() : host;
  }

  /// The address of the generation's store, once its first member has told it.
  std::string store_address() {
    std::string address;
    link.wait_until([&](const Member& member) {
      address = member.store_address();
      return member.stage() != Stage::Placed || !address.empty();
    });
    return address;
  }

  ProcessGroupOptions options_for(const GenerationForm& form) {
    auto options = group_options;
    options.rank(form.rank).world_size(static_cast<int>(form.slots.size()));
    if (form.slots.size() == 1) return options.store(c10::make_intrusive<c10d::HashStore>());
    if (form.rank == 0) {
      std::string address;
      options.store(open_generation_store(own_host(), kMeetWithin, address));
      link.with([&](Member& member, Member::Time) { member.store(address); });
      return options;
    }
    const auto address = store_address();
    DDP_CHECK(!address.empty(), "generation ", form.number, " ended before its ranks met");
    return options.init_method("tcp://" + address);
  }
  membership::You answer();
  bool throw_if_over() const;
  [[noreturn]] static void throw_too_late();

  const ProcessGroupOptions group_options;
  mutable std::mutex mutex;  // guards `job`
  std::shared_ptr<JobMonitor> job;
  int64_t generation = 0;  // the last that next() returned
  std::atomic<bool> leaves{false};
  std::atomic<int64_t> ended_before{0};  // all generations below it have ended
  Meeting meeting;
  MemberLink link;  // last: its thread uses the others
};

Generations::Generations(const Settings& settings) : impl_(std::make_shared<Impl>(settings)) {}

Generations::~Generations() = default;

/// \return whether this process has left, or the job is done.
bool Generations::Impl::throw_if_over() const {
  const auto end = link.look([](const Member& member) { return member.end(); });
  switch (end.how) {
    case Member::Ending::None:
      return false;
    case Member::Ending::Left:
      return true;
    case Member::Ending::Fenced:
      throw readable_error<Fenced>(
          DDP_HERE, ddp::str("the others go on without this rank: ", end.why, "."));
    case Member::Ending::Failed:
      break;
  }
  throw readable_error<QuorumLost>(DDP_HERE, ddp::str("the job cannot go on: ", end.why, "."));
}

void Generations::Impl::throw_too_late() {
  throw readable_error<Fenced>(
      DDP_HERE, "the job was done before this process could join it: it has no state.");
}

membership::You Generations::Impl::answer() {
  link.wait_until([](const Member& member) { return member.stage() != Stage::Starting; });
  if (throw_if_over()) throw_too_late();
  return link.look([](const Member& member) { return *member.you(); });
}

int Generations::slot() const { return impl_->answer().slot; }

int Generations::size() const { return impl_->answer().size; }

bool Generations::joins() const { return impl_->answer().joins; }

std::optional<GenerationForm> Generations::next(const HeldState& held) {
  auto& link = impl_->link;
  for (;;) {
    const auto stage = link.look([](const Member& member) { return member.stage(); });
    if (stage == Stage::Over) {
      const bool is_over = impl_->throw_if_over();
      if (is_over && held.kind == HeldState::Kind::None && !impl_->leaves) impl_->throw_too_late();
      return std::nullopt;
    }
    if (stage == Stage::Placed) {
      const auto form = link.look(form_of);
      if (form.number > impl_->generation) {
        impl_->generation = form.number;
        return form;
      }
    }
    const bool goes_on = stage == Stage::Placed || stage == Stage::Met || stage == Stage::Training;
    link.with([&](Member& member, Member::Time now) {
      if (stage == Stage::Preparing) member.ready();
      if (stage == Stage::Asked) {
        member.report(member.generation(), held.applied, held.turns, holding_of(held.kind));
      }
      // The coordinator knows of no failure yet.
      const auto why = held.why.empty() ? "a call of this rank failed" : held.why;
      if (goes_on) member.lost(now, impl_->generation, {}, why);
    });
    link.wait_until([&](const Member& member) { return member.stage() != stage; });
  }
}

ProcessGroup Generations::meet(const GenerationForm& form) {
  ProcessGroup group;
  try {
    auto options = impl_->options_for(form);
    GenerationOfJob generation;
    generation.number = form.number;
    generation.report = [impl = std::weak_ptr(impl_), form](
                            const std::string& why, const FindBlamed& find_blamed) {
      const auto alive = impl.lock();
      return alive ? alive->report_failure(form, why, find_blamed) : why;
    };
    group = impl_->meeting.run(
        [options = std::move(options), generation = std::move(generation)] {
          return build_group(options, generation, kMeetWithin);
        },
        [this] { return has_ended(); });
  } catch (const c10::Error& error) {
    impl_->link.with([&](Member& member, Member::Time now) {
      member.lost(now, form.number, {}, text_of(error));
    });
    return {};
  }
  if (!group) return {};
  const auto& own = dynamic_cast<const MonitoredGroup&>(*group);
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->job = own.recipe().job;
  }
  if (has_ended()) {
    own.recipe().job->end_generation(GenerationEnd::RankLost, "the generation ended");
    return {};
  }
  impl_->link.with([&](Member& member, Member::Time) { member.met(form.number); });
  return group;
}

void Generations::entered() {
  impl_->link.with([&](Member& member, Member::Time) { member.entered(impl_->generation); });
}

bool Generations::has_ended() const { return impl_->ended_before > impl_->generation; }

bool Generations::has_thrown() const {
  const auto job = impl_->current_job();
  return job && job->has_thrown();
}

bool Generations::change_is_wanted() const {
  return impl_->link.look([](const Member& member) { return member.change_is_wanted(); });
}

void Generations::pause() {
  impl_->link.with([&](Member& member, Member::Time now) { member.pause(now, impl_->generation); });
}

void Generations::done() {
  impl_->link.with([&](Member& member, Member::Time now) { member.done(now, impl_->generation); });
}

bool Generations::wait_until_all_are_done() {
  impl_->link.wait_until([](const Member& member) { return member.stage() != Stage::Done; });
  return impl_->link.look([](const Member& member) {
    return member.stage() == Stage::Over && member.end().how == Member::Ending::Left;
  });
}

std::string Generations::why() const {
  return impl_->link.look([](const Member& member) { return member.why(); });
}

void Generations::leave() {
  impl_->leaves = true;
  impl_->link.with([](Member& member, Member::Time) { member.leave(); });
}

void Generations::set_coordinator_patience(milliseconds limit) {
  impl_->link.with([&](Member& member, Member::Time) { member.set_coordinator_patience(limit); });
}

void Generations::disconnect_without_reply() {
  impl_->link.with([](Member& member, Member::Time) { member.disconnect_without_reply(); });
}

void Generations::threw(int64_t applied, const std::string& why) {
  impl_->link.with([&](Member& member, Member::Time) { member.threw(applied, why); });
  impl_->link.flush();
}

}  // namespace ddp
