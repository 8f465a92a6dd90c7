#include "launch/membership_simulator.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ddp/internal/text.h>

#include "comm/membership/member.h"
#include "launch/membership/membership.h"

namespace ddp::testing {
namespace {

using namespace ddp::membership;
using launch::Membership;
using launch::MembershipLimits;
using Time = std::chrono::milliseconds;

constexpr Time kTick(50);
constexpr int64_t kNoisyTicks = 300;
constexpr int64_t kQuietTicks = 2000;
constexpr int kBreaksInARow = 2;  // of a process's connections
constexpr int64_t kTicksOfBreaks = 40;
constexpr int64_t kReportTicks = 100;  // the limit of a report, and of a group's wait

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void expect(bool holds, const std::string& rule) {
  if (!holds) throw Broken(rule);
}

template <typename Message>
struct Queue {
  std::deque<std::pair<int64_t, Message>> messages;  // with the tick of arrival
};

struct Process {
  int pid = 0;
  int slot = 0;
  int host = 0;
  std::optional<Member> member;
  int connection = 0;  // 0: none
  bool wants_connection = false;
  int64_t connects_at = 0;
  int64_t broke_at = 0;
  int breaks = 0;           // in a row
  bool close_seen = false;  // the coordinator closed, and the member does not know
  Queue<CoordinatorMessage> inbox;
  int64_t stopped_until = 0;
  int64_t hangs_until = 0;
  int64_t stuck_since = 0;
  // the training
  Holding holding = Holding::None;
  int64_t applied = 0;
  uint64_t state = 1;  // a hash of all steps
  int late_steps = 0;  // applied after a newer generation trained
};

struct Link {
  int pid = 0;
  int host = 0;
  Queue<std::optional<MemberMessage>> outbox;  // nothing: the end
  bool is_broken = false;                      // carries nothing any more
};

class Simulation {
 public:
  explicit Simulation(const Schedule& schedule) : schedule_(schedule), random_(schedule.seed) {
    limits_.max_ranks = schedule.ranks;
    limits_.min_ranks = schedule.min_ranks;
    limits_.slots = schedule.ranks;
    limits_.lost_after = Time(schedule.healthy ? 5000 : 2000);
    limits_.wait = Time(20000);
    limits_.hold = Time(below(2) * 1000);
    limits_.report = kTick * kReportTicks;
    limits_.accused = Time(1000);
    limits_.entry = Time(3000);
    limits_.kill = Time(300);
    limits_.back = Time(schedule.healthy ? 4000 : 1000);  // longer than two breaks and a stop
    last_step_ = 20 + below(100);
    rare_ = 30 + below(150);
    quiet_at_first_ = below(60);
    begin();
  }

  Outcome run() {
    Outcome outcome;
    try {
      for (tick_ = 1; !over_ && tick_ < kNoisyTicks + kQuietTicks; ++tick_) step();
      expect(over_, "the job ends: " + describe());
    } catch (const Broken& broken) {
      outcome.error = str("seed ", schedule_.seed, ", tick ", tick_, ": ", broken.what());
    }
    outcome.code = code_;
    outcome.generations = newest_;
    outcome.steps = steps_;
    outcome.started_again = started_again_;
    outcome.lost = lost_;
    outcome.breaks = breaks_;
    outcome.stops = stops_;
    return outcome;
  }

 private:
  Time now() const { return kTick * tick_; }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool once_in(int64_t n) { return below(n) == 0; }
  bool is_cut(int host) const { return host == 1 && tick_ < cut_until_; }

  void begin() {
    make_machine({});
    for (int slot = 0; slot < schedule_.ranks; ++slot) start(slot);
  }

  void make_machine(std::optional<launch::Remembered> earlier) {
    machine_ = std::make_unique<Membership>(limits_, now(), std::move(earlier));
    machine_->set_launched(schedule_.launched);
  }

  void start(int slot) {
    Process process;
    process.pid = ++last_pid_;
    process.slot = slot;
    process.host = schedule_.hosts && slot % 2 == 1 ? 1 : 0;
    Hello hello{"t", random_() | 1, slot, process.pid, str("host", process.host)};
    process.member.emplace(hello, now());
    processes_[process.pid] = std::move(process);
  }

  void step() {
    if (quiet_at_first_ < tick_ && tick_ < kNoisyTicks) disturb();
    if (machine_ == nullptr && tick_ >= machine_back_) make_machine(remembered_);
    if (tick_ >= machine_stopped_until_) {
      deliver_to_machine();
      obey_machine();
    }
    for (const int pid : shuffled_pids()) {
      const auto found = processes_.find(pid);
      if (found != processes_.end()) act(found->second);
    }
    start_replacements();
    // As a launcher without a process and without one to start.
    over_ = over_ || (processes_.empty() && exits_.empty() && replacements_.empty());
  }

  std::vector<int> shuffled_pids() {
    std::vector<int> pids;
    for (const auto& [pid, process] : processes_) pids.push_back(pid);
    std::shuffle(pids.begin(), pids.end(), random_);
    return pids;
  }

  // What happens to the job.

  void disturb() {
    if (schedule_.breaks && (!schedule_.healthy || has_begun())) disturb_connections();
    if (schedule_.healthy) return;
    if (once_in(rare_) && !processes_.empty()) {
      auto one = std::next(processes_.begin(), below(static_cast<int64_t>(processes_.size())));
      Process& process = one->second;
      switch (below(7)) {
        case 0:
        case 1:
        case 2:
          return end(process.pid, 1);
        case 3:
          process.stopped_until = tick_ + below(120);
          return;
        case 4:
          process.hangs_until = tick_ + below(200);
          return;
        case 5:
          process.member->leave();
          return;
        default:
          if (process.member->stage() != Member::Stage::Training) return;
          process.member->threw(process.applied, "user code");
          return flush_and_end(process);
      }
    }
    if (schedule_.hosts && once_in(100)) cut_until_ = tick_ + below(100);
    if (schedule_.restarts && machine_ != nullptr && once_in(100)) {
      machine_.reset();
      machine_back_ = tick_ + 1 + below(100);
      for (auto& [pid, process] : processes_) process.close_seen = process.connection != 0;
      links_.clear();
    }
  }

  bool has_begun() const {
    return machine_ != nullptr && machine_->established() && !processes_.empty();
  }

  void disturb_connections() {
    if (once_in(30) && !processes_.empty()) {
      auto one = std::next(processes_.begin(), below(static_cast<int64_t>(processes_.size())));
      break_connection(one->second, schedule_.healthy ? below(2) : below(3));
    }
    if (tick_ < machine_stopped_until_ || !once_in(100)) return;
    ++stops_;
    const int64_t ticks = below(120);
    machine_stopped_until_ = tick_ + ticks;
    if (!once_in(2)) return;
    for (auto& [pid, process] : processes_) {  // all stop with it
      process.stopped_until = machine_stopped_until_;
      process.stuck_since += ticks;
    }
  }

  /// Loses the last lines of a connection that were on their way.
  ///
  /// \param side  0: both sides see it end. 1: only the process does, and lines that it sent come
  ///        late, if at all. 2: only the coordinator does.
  void break_connection(Process& process, int64_t side) {
    const auto found = links_.find(process.connection);
    if (found == links_.end() || found->second.is_broken) return;
    if (tick_ > process.broke_at + kTicksOfBreaks) process.breaks = 0;
    if (++process.breaks > kBreaksInARow) return;
    process.broke_at = tick_;
    ++breaks_;
    Link& link = found->second;
    link.is_broken = true;
    const int64_t late = side == 1 ? below(60) : 0;
    auto& sent = link.outbox.messages;
    if (once_in(2)) sent.resize(static_cast<size_t>(below(static_cast<int64_t>(sent.size()) + 1)));
    for (auto& [tick, message] : sent) tick += late;
    if (side != 1 || once_in(2)) sent.push_back({later() + late + below(4), std::nullopt});
    auto& coming = process.inbox.messages;
    coming.resize(static_cast<size_t>(below(static_cast<int64_t>(coming.size()) + 1)));
    process.close_seen = process.close_seen || side != 2;
  }

  /// A process that throws says so before it ends.
  void flush_and_end(Process& process) {
    obey(process);
    end(process.pid, 1);
  }

  void end(int pid, int code) {
    const auto found = processes_.find(pid);
    if (found == processes_.end()) return;
    const Process& process = found->second;
    const auto link = links_.find(process.connection);
    if (link != links_.end()) link->second.outbox.messages.push_back({later(), std::nullopt});
    exits_.push_back({tick_ + below(4), process.slot, pid, process.host, code});
    processes_.erase(found);
  }

  int64_t later() { return tick_ + 1 + below(4); }

  // The coordinator's side.

  void deliver_to_machine() {
    if (machine_ == nullptr) return;
    std::vector<int> names;
    for (const auto& [name, link] : links_) names.push_back(name);
    for (const int name : names) {
      for (;;) {
        const auto link = links_.find(name);
        if (link == links_.end() || is_cut(link->second.host)) break;
        auto& messages = link->second.outbox.messages;
        if (messages.empty() || messages.front().first > tick_) break;
        const auto message = messages.front().second;
        messages.pop_front();
        if (message) {
          machine_->on_message(now(), name, read_again<MemberMessage>(*message));
        } else {
          links_.erase(name);
          machine_->on_closed(now(), name);
        }
        obey_machine();
        if (machine_ == nullptr) return;
      }
    }
    for (auto exit = exits_.begin(); exit != exits_.end();) {
      if (exit->tick > tick_ || is_cut(exit->host)) {
        ++exit;
        continue;
      }
      if (schedule_.launched) machine_->on_exited(now(), exit->slot, exit->pid, "was killed");
      const bool is_replaced = machine_->established() || !schedule_.launched;
      if (exit->code != 0 && is_replaced && tick_ % 7 != 0) {
        replacements_.push_back({tick_ + 1 + below(10), exit->slot});
      } else if (exit->code != 0 && machine_->generation() == 0 && schedule_.launched) {
        again_ = true;
      }
      exit = exits_.erase(exit);
    }
    machine_->on_time(now());
    if (again_) start_again();
  }

  void obey_machine() {
    if (machine_ == nullptr) return;
    for (const auto& order : machine_->take_orders()) {
      std::visit([this](const auto& one) { obey_order(one); }, order);
    }
    if (again_) start_again();
  }

  void obey_order(const Membership::Send& send) {
    if (const auto* form = std::get_if<Form>(&send.message)) check_form(*form);
    const bool costs = std::holds_alternative<Fenced>(send.message) ||
                       std::holds_alternative<Gather>(send.message);
    if (costs && has_begun()) ++lost_;
    const auto link = links_.find(send.to);
    if (link == links_.end() || link->second.is_broken) return;
    const auto process = processes_.find(link->second.pid);
    if (process == processes_.end()) return;
    process->second.inbox.messages.push_back(
        {later(), read_again<CoordinatorMessage>(send.message)});
  }
  void obey_order(const Membership::Close& close) {
    const auto link = links_.find(close.connection);
    if (link == links_.end()) return;
    const auto process = processes_.find(link->second.pid);
    const bool is_its = process != processes_.end() && !link->second.is_broken &&
                        process->second.connection == close.connection;
    if (is_its) process->second.close_seen = true;
    links_.erase(link);
  }
  void obey_order(const Membership::Kill& kill) {
    const auto process = processes_.find(kill.pid);
    if (process == processes_.end()) {
      for (const Exit& exit : exits_) {
        if (exit.pid == kill.pid) return;
      }
      return;
    }
    if (is_cut(process->second.host) || !schedule_.launched) return;
    end(kill.pid, 1);
  }
  void obey_order(const Membership::Remember& remember) {
    if (remembered_) {
      expect(remember.state.number >= remembered_->number, "numbers grow");
      expect(remember.state.formed >= remembered_->formed, "formed numbers grow");
    }
    remembered_ = remember.state;
  }
  void obey_order(const Membership::Say& /*say*/) {}
  void obey_order(const Membership::StartAgain& /*again*/) {
    expect(schedule_.launched, "what was started by hand is not started again");
    if (has_begun()) ++lost_;
    again_ = true;
  }
  void obey_order(const Membership::Finish& finish) {
    over_ = true;
    code_ = finish.code;
  }

  void start_again() {
    again_ = false;
    started_again_ = true;
    processes_.clear();
    links_.clear();
    exits_.clear();
    replacements_.clear();
    contributions_.clear();
    before_step_.clear();
    pauses_.clear();
    remembered_.reset();
    newest_ = 0;
    cut_until_ = 0;
    begin();
  }

  void check_form(const Form& form) {
    expect(remembered_ && remembered_->formed == form.generation, "a generation is remembered");
    if (form.generation == checked_form_) return;
    expect(form.generation > newest_formed_ || started_again_, "generations grow");
    newest_formed_ = checked_form_ = form.generation;
    expect(static_cast<int>(form.members.size()) >= limits_.min_ranks, "the minimum is kept");
    expect(static_cast<int>(form.members.size()) <= limits_.max_ranks, "the maximum is kept");
    for (const auto& [pid, process] : processes_) {
      const Member& member = *process.member;
      const bool reported = member.stage() == Member::Stage::Reported &&
                            member.generation() == form.generation &&
                            process.holding == Holding::Whole;
      const bool takes_part = std::any_of(
          form.members.begin(), form.members.end(),
          [&](const Place& place) { return place.id == member.id(); });
      if (reported && takes_part) {
        expect(process.applied <= form.applied, "the highest applied step wins");
      }
      if (takes_part && process.member->stage() != Member::Stage::Ready) {
        expect(
            member.stage() == Member::Stage::Reported || member.stage() == Member::Stage::Over,
            str("members have stopped: slot ", process.slot, " is in stage ",
                static_cast<int>(member.stage()), " of generation ", member.generation()));
      }
    }
  }

  // The members' side.

  void act(Process& process) {
    if (tick_ < process.stopped_until) return;
    const int pid = process.pid;
    const bool may_connect = machine_ != nullptr && !is_cut(process.host);
    if (process.wants_connection && may_connect && tick_ >= process.connects_at) {
      process.wants_connection = false;
      process.connection = ++last_connection_;
      links_[process.connection] = {pid, process.host, {}, false};
      process.inbox.messages.clear();
      process.close_seen = false;
      process.member->on_connected(now());
      obey(process);
      const bool has_begun = !schedule_.healthy || this->has_begun();
      const bool breaks = schedule_.breaks && has_begun && tick_ < kNoisyTicks;
      if (breaks && once_in(6)) break_connection(process, 1);  // it introduces itself again
    }
    receive(process);
    process.member->on_time(now());
    if (tick_ >= process.hangs_until) train(process);
    obey(process);
    if (process.member->stage() != Member::Stage::Over) return;
    end(pid, process.member->end().how == Member::Ending::Left ? 0 : 1);
  }

  void receive(Process& process) {
    auto& messages = process.inbox.messages;
    while (!is_cut(process.host) && !messages.empty() && messages.front().first <= tick_) {
      process.member->on_message(now(), messages.front().second);
      messages.pop_front();
    }
    if (process.close_seen && !is_cut(process.host) && messages.empty()) {
      process.close_seen = false;
      process.connection = 0;
      process.member->on_disconnected(now());
    }
  }

  void obey(Process& process) {
    for (const auto& order : process.member->take_orders()) {
      const auto link = links_.find(process.connection);
      const bool is_whole = link != links_.end() && !link->second.is_broken;
      if (const auto* send = std::get_if<Member::Send>(&order)) {
        if (is_whole) link->second.outbox.messages.push_back({later(), send->message});
      } else if (std::holds_alternative<Member::Connect>(order)) {
        process.wants_connection = true;
        process.connects_at = tick_ + below(5);
      } else if (std::holds_alternative<Member::Disconnect>(order)) {
        if (is_whole) link->second.outbox.messages.push_back({later(), std::nullopt});
        process.connection = 0;
        process.close_seen = false;
      }
    }
  }

  /// What the user's thread does.
  void train(Process& process) {
    Member& member = *process.member;
    const int64_t generation = member.generation();
    switch (member.stage()) {
      case Member::Stage::Preparing:
        if (once_in(5)) member.ready();
        break;
      case Member::Stage::Asked:
        process.stuck_since = tick_;
        if (once_in(3)) member.report(generation, process.applied, 0, process.holding);
        break;
      case Member::Stage::Placed:
        process.stuck_since = tick_;
        if (member.form().members.front().id == member.id()) member.store("h:1");
        if (!member.store_address().empty() && once_in(2)) member.met(generation);
        break;
      case Member::Stage::Met:
        enter(process);
        break;
      case Member::Stage::Training:
        train_step(process);
        break;
      default:
        break;
    }
  }

  /// The others of the generation, as its groups see them.
  std::vector<const Process*> others_of(const Process& process) const {
    std::vector<const Process*> others;
    for (const Place& place : process.member->form().members) {
      const auto found = std::find_if(processes_.begin(), processes_.end(), [&](const auto& entry) {
        return entry.second.member->id() == place.id;
      });
      others.push_back(found == processes_.end() ? nullptr : &found->second);
    }
    return others;
  }

  bool reaches(const Process& process, const Process& other) const {
    return process.host == other.host || tick_ >= cut_until_;
  }

  /// Gives up on a group whose members ended or went on, or which does not get any further.
  void give_up_if_broken(Process& process) {
    Member& member = *process.member;
    const bool late = tick_ > process.stuck_since + kReportTicks;
    for (size_t rank = 0; rank < member.form().members.size(); ++rank) {
      const Process* other = others_of(process)[rank];
      const bool gone = other == nullptr || other->member->generation() != member.generation();
      const bool hangs =
          other != nullptr && late && (tick_ < other->hangs_until || tick_ < other->stopped_until);
      if ((gone && once_in(5)) || hangs) {
        return member.lost(
            now(), member.generation(), {member.form().members[rank].id}, "the group failed");
      }
    }
    if (late) member.lost(now(), member.generation(), {}, "timeout");
  }

  void enter(Process& process) {
    Member& member = *process.member;
    const Form& form = member.form();
    bool all_here = true;
    const Process* source = nullptr;
    for (const Process* other : others_of(process)) {
      const bool here = other != nullptr && reaches(process, *other) &&
                        other->member->generation() == form.generation &&
                        other->member->stage() >= Member::Stage::Met &&
                        other->member->stage() != Member::Stage::Over;
      all_here = all_here && here;
      if (here && std::count(form.sources.begin(), form.sources.end(), other->member->id()) > 0) {
        source = other;
      }
    }
    if (!all_here) return give_up_if_broken(process);
    if (!form.sources.empty()) {
      expect(source != nullptr, "a source is a member");
      if (process.holding != Holding::Whole || process.applied < form.applied) {
        if (source->applied != form.applied) return give_up_if_broken(process);  // trains already
        process.state = source->state;
        process.applied = source->applied;
      }
      expect(process.applied == form.applied, "the state is that of the generation");
    }
    process.holding = Holding::Whole;
    process.stuck_since = tick_;
    member.entered(form.generation);
  }

  void train_step(Process& process) {
    Member& member = *process.member;
    const int64_t generation = member.generation();
    const int64_t step = process.applied + 1;
    if (step > last_step_) return member.done(now(), generation);
    auto& contributed = contributions_[generation];
    if (contributed[member.id()] < step) {
      if (!once_in(2)) return;
      contributed[member.id()] = step;
      if (member.change_is_wanted()) pauses_.insert({generation, step});
    }
    const auto others = others_of(process);
    for (size_t rank = 0; rank < others.size(); ++rank) {
      const ProcessId id = member.form().members[rank].id;
      const bool cut = others[rank] != nullptr && !reaches(process, *others[rank]);
      if (contributed[id] < step || cut) return give_up_if_broken(process);
    }
    apply(process, generation, step);
    if (pauses_.count({generation, step}) > 0) member.pause(now(), generation);
  }

  /// A process that was left out may still apply, to itself, what the others had contributed to
  /// before they stopped: the step that they applied, and the next one.
  void apply(Process& process, int64_t generation, int64_t step) {
    if (generation < newest_) expect(++process.late_steps <= 2, "no two generations train at once");
    newest_ = std::max(newest_, generation);
    const auto [before, first] = before_step_.insert({{generation, step}, process.state});
    expect(before->second == process.state, "members have one state");
    if (first) ++steps_;
    process.applied = step;
    process.state =
        process.state * 6364136223846793005U + static_cast<uint64_t>(generation * 1000 + step);
    process.stuck_since = tick_;
  }

  void start_replacements() {
    for (auto one = replacements_.begin(); one != replacements_.end();) {
      if (one->first > tick_) {
        ++one;
        continue;
      }
      start(one->second);
      one = replacements_.erase(one);
    }
  }

  template <typename Message>
  static Message read_again(const Message& message) {
    const auto line = line_of(message);
    auto read = message_of<Message>(line);
    expect(read.has_value() && line_of(*read) == line, "a line can be read: " + line);
    return *read;
  }

  std::string describe() const {
    std::string text = str("machine generation ", machine_ ? machine_->generation() : -1);
    for (const auto& [pid, process] : processes_) {
      text += str(
          "; pid ", pid, " slot ", process.slot, " stage ",
          static_cast<int>(process.member->stage()), " generation ", process.member->generation(),
          " applied ", process.applied, " connection ", process.connection);
    }
    return text;
  }

  struct Exit {
    int64_t tick;
    int slot;
    int pid;
    int host;
    int code;
  };

  const Schedule schedule_;
  std::mt19937_64 random_;
  MembershipLimits limits_;
  std::unique_ptr<Membership> machine_;  // none: it was ended
  int64_t machine_back_ = 0;
  int64_t machine_stopped_until_ = 0;
  std::optional<launch::Remembered> remembered_;
  int64_t tick_ = 0;
  int64_t cut_until_ = 0;
  int64_t last_step_ = 0;
  int64_t rare_ = 0;  // of what happens
  int64_t quiet_at_first_ = 0;
  int last_pid_ = 0;
  int last_connection_ = 0;
  std::map<int, Process> processes_;  // by pid
  std::map<int, Link> links_;         // by connection
  std::vector<Exit> exits_;
  std::vector<std::pair<int64_t, int>> replacements_;
  bool again_ = false;
  bool started_again_ = false;
  bool over_ = false;
  int code_ = -1;
  // the checks
  int64_t newest_ = 0;
  int64_t newest_formed_ = 0;
  int64_t checked_form_ = 0;
  int64_t steps_ = 0;
  int lost_ = 0;
  int breaks_ = 0;
  int stops_ = 0;
  std::map<int64_t, std::map<ProcessId, int64_t>> contributions_;
  std::map<std::pair<int64_t, int64_t>, uint64_t> before_step_;
  std::set<std::pair<int64_t, int64_t>> pauses_;  // generation, step
};

}  // namespace

Outcome simulate(const Schedule& schedule) { return Simulation(schedule).run(); }

int schedules() {
  const char* count = std::getenv("DDP_SCHEDULES");
  return count == nullptr ? 1500 : std::atoi(count);
}

}  // namespace ddp::testing
