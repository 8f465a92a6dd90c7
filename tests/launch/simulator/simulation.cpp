#include "launch/simulator/simulation.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ddp/internal/membership/reform.h>
#include <ddp/internal/text.h>

#include "launch/membership/membership.h"
#include "launch/simulator/network.h"
#include "launch/simulator/process.h"
#include "launch/simulator/training.h"

namespace ddp::testing {
namespace {

using launch::Membership;
using launch::MembershipLimits;

constexpr int64_t kNoisyTicks = 300;
constexpr int64_t kQuietTicks = 2000;

class Simulation {
 public:
  explicit Simulation(const Schedule& schedule) : schedule_(schedule), chance_(schedule.seed) {
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
    training_.set_last_step(20 + below(100));
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
    outcome.generations = training_.newest_generation();
    outcome.steps = training_.steps();
    outcome.started_again = started_again_;
    outcome.lost = lost_;
    outcome.breaks = network_.breaks();
    outcome.stops = stops_;
    return outcome;
  }

 private:
  Time now() const { return chance_.now(); }
  int64_t below(int64_t n) { return chance_.below(n); }
  bool once_in(int64_t n) { return chance_.once_in(n); }

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
    Hello hello{"t", chance_.random() | 1, slot, process.pid, str("host", process.host)};
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
    std::shuffle(pids.begin(), pids.end(), chance_.random);
    return pids;
  }

  // Events of the job.

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
    if (schedule_.hosts && once_in(100)) network_.cut_until(tick_ + below(100));
    if (schedule_.restarts && machine_ != nullptr && once_in(100)) {
      machine_.reset();
      machine_back_ = tick_ + 1 + below(100);
      network_.drop_all();
    }
  }

  bool has_begun() const {
    return machine_ != nullptr && machine_->established() && !processes_.empty();
  }

  void disturb_connections() {
    if (once_in(30) && !processes_.empty()) {
      auto one = std::next(processes_.begin(), below(static_cast<int64_t>(processes_.size())));
      network_.break_connection(one->second, schedule_.healthy ? below(2) : below(3));
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

  /// A process that throws says so before it ends.
  void flush_and_end(Process& process) {
    network_.follow_orders(process);
    end(process.pid, 1);
  }

  void end(int pid, int code) {
    const auto found = processes_.find(pid);
    if (found == processes_.end()) return;
    const Process& process = found->second;
    network_.hang_up(process);
    exits_.push_back({tick_ + below(4), process.slot, pid, process.host, code});
    processes_.erase(found);
  }

  // The coordinator's side.

  void deliver_to_machine() {
    if (machine_ == nullptr) return;
    for (const int connection : network_.connections()) {
      while (const auto arrival = network_.take(connection)) {
        if (arrival->message) {
          machine_->on_message(now(), connection, *arrival->message);
        } else {
          machine_->on_closed(now(), connection);
        }
        obey_machine();
      }
    }
    for (auto exit = exits_.begin(); exit != exits_.end();) {
      if (exit->tick > tick_ || network_.is_cut(exit->host)) {
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
    if (const auto* change = std::get_if<Reform>(&send.message)) check_reform(*change);
    const bool costs = std::holds_alternative<Fenced>(send.message) ||
                       std::holds_alternative<Gather>(send.message);
    if (costs && has_begun()) ++lost_;
    network_.send(send.to, send.message);
  }
  void obey_order(const Membership::Close& close) { network_.close(close.connection); }
  void obey_order(const Membership::Kill& kill) {
    const auto process = processes_.find(kill.pid);
    if (process == processes_.end()) {
      for (const Exit& exit : exits_) {
        if (exit.pid == kill.pid) return;
      }
      return;
    }
    if (network_.is_cut(process->second.host) || !schedule_.launched) return;
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
    exits_.clear();
    replacements_.clear();
    network_.begin_again();
    training_.begin_again();
    remembered_.reset();
    checked_form_ = 0;
    begin();
  }

  void check_reform(const Reform& change) {
    if (change.generation != form_.generation) {
      const auto form = apply(change, form_);
      expect(form.has_value(), "a change is one of the last form");
      check_form(*form);
    }
  }

  void check_form(const Form& form) {
    expect(remembered_ && remembered_->formed == form.generation, "a generation is remembered");
    if (form.generation == checked_form_) {
      return expect(
          line_of(CoordinatorMessage(form)) == line_of(CoordinatorMessage(form_)),
          "all are told one form");
    }
    form_ = form;
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
    if (machine_ != nullptr && network_.connect(process)) {
      process.member->on_connected(now());
      network_.follow_orders(process);
      const bool has_begun = !schedule_.healthy || this->has_begun();
      const bool breaks = schedule_.breaks && has_begun && tick_ < kNoisyTicks;
      // The process introduces itself again.
      if (breaks && once_in(6)) network_.break_connection(process, 1);
    }
    network_.receive(process);
    process.member->on_time(now());
    if (tick_ >= process.hangs_until) training_.act(process);
    network_.follow_orders(process);
    if (process.member->stage() != Member::Stage::Over) return;
    end(pid, process.member->end().how == Member::Ending::Left ? 0 : 1);
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
  Chance chance_;
  int64_t& tick_ = chance_.tick;
  MembershipLimits limits_;
  std::unique_ptr<Membership> machine_;  // none: it was ended
  int64_t machine_back_ = 0;
  int64_t machine_stopped_until_ = 0;
  std::optional<launch::Remembered> remembered_;
  int64_t rare_ = 0;  // of what happens
  int64_t quiet_at_first_ = 0;
  int last_pid_ = 0;
  Processes processes_;
  Network network_{chance_, processes_};
  Training training_{chance_, processes_, network_};
  std::vector<Exit> exits_;
  std::vector<std::pair<int64_t, int>> replacements_;
  bool again_ = false;
  bool started_again_ = false;
  bool over_ = false;
  int code_ = -1;
  // the checks
  int64_t newest_formed_ = 0;
  int64_t checked_form_ = 0;
  Form form_;  // that one
  int lost_ = 0;
  int stops_ = 0;
};

}  // namespace

Outcome simulate(const Schedule& schedule) { return Simulation(schedule).run(); }

int schedules() {
  const char* count = std::getenv("DDP_SCHEDULES");
  return count == nullptr ? 1500 : std::atoi(count);
}

int first_schedule() {
  const char* seed = std::getenv("DDP_TEST_SEED");
  return seed == nullptr ? 0 : (std::atoi(seed) - 1) * schedules();
}

}  // namespace ddp::testing
