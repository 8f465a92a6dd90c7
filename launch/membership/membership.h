#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ddp/internal/membership/lines.h>

#include "launch/membership/peers.h"

namespace ddp::launch {

using membership::CoordinatorMessage;
using membership::MemberMessage;
using membership::Place;
using membership::ProcessId;

/// How many processes a job has, and for how long it waits.
struct MembershipLimits {
  using ms = std::chrono::milliseconds;
  int max_ranks = 1;  // members; other processes wait as spares
  int min_ranks = 1;
  int first_ranks = 0;   // awaited at the start, for `wait`; 0: max_ranks
  int slots = 1;         // of the launchers; processes that were started by hand may get more
  ms lost_after{10000};  // without a sign of life
  ms wait{600000};       // for the minimum, and for the last `done`
  ms hold{0};            // for a replacement, where the minimum is there
  ms report{1800000};    // of a member that is alive
  ms accused{5000};      // the same, where half of the other members report that it hangs
  ms entry{30000};       // until the groups of a generation are made
  ms pause{500};         // of all members at the boundary at which the first one pauses
  ms kill{2000};         // until a process that was killed has ended
  ms back{2000};         // until a process is back whose connection ended
};

/// The state that a coordinator needs after a restart; it is written before a generation begins.
struct Remembered {
  int64_t number = 0;          // the highest that was sent to any member
  int64_t formed = 0;          // the generation of `members`
  bool established = false;    // a generation was entered by all
  std::vector<Place> members;  // of the generation that was formed last
};

/// Decides which processes make up each generation of an elastic job.
///
/// A pure state machine: events in, orders out. It has no sockets, no threads, and no clock: each
/// event carries the time, which must not go back.
///
/// A connection is not the process: one that comes back by another connection has the part that it
/// had, and both sides repeat what may have been lost on the way. Time in which the coordinator
/// itself did not run counts for nothing.
///
///   Returning  after a restart, until the members are back
///   Gathering  members report; then waits for the minimum, and for processes that were killed
///   Entering   a generation was formed, and its members make groups and get the state
///   Running    all train
///   Over       the last order was Finish or StartAgain
///
/// A generation trains only while all its members do, so two cannot train at once where the later
/// one has a member of the earlier one, which has stopped before it reports. A generation has such
/// a member, because its state comes from one.
class Membership {
 public:
  using Time = std::chrono::milliseconds;  // since any moment
  using Connection = int;                  // the caller's name of one; never used again

  struct Send {
    Connection to;
    CoordinatorMessage message;
  };
  struct Close {  // after what was sent
    Connection connection;
  };
  /// End this process, if it can be done from here; then report `exited`.
  struct Kill {
    int slot;
    int pid;
    std::string host;
  };
  struct Remember {
    Remembered state;
  };
  /// A line for the user.
  struct Say {
    std::string text;
  };
  /// End all processes, see them gone, and begin with a new Membership.
  struct StartAgain {
    std::string why;
  };
  /// The job is over. The processes end by themselves.
  struct Finish {
    int code;
    std::string why;
  };
  using Order = std::variant<Send, Close, Kill, Remember, Say, StartAgain, Finish>;

  /// \param remembered  by an earlier one, if this one replaces it.
  Membership(const MembershipLimits& limits, Time now, std::optional<Remembered> remembered = {});

  void on_message(Time now, Connection from, const MemberMessage& message);
  /// A connection ended, by whichever side. Its process has a while to come back.
  void on_closed(Time now, Connection connection);
  /// A launcher has reaped the process. \param how  "was killed by signal 9 (SIGKILL)".
  void on_exited(Time now, int slot, int pid, const std::string& how);
  /// Sets whether a launcher is there, which can start all processes again. Without a launcher, all
  /// were started by hand, and the remaining ones continue.
  void set_launched(bool launched) { launched_ = launched; }
  /// The process of this slot is to leave at the next boundary.
  void on_leave_wanted(Time now, int slot);
  void on_time(Time now);

  /// When on_time() has something to do; nothing: not before another event.
  std::optional<Time> next_time() const;
  /// The orders since the last call, in the order in which they have to be followed.
  std::vector<Order> take_orders() { return std::exchange(orders_, {}); }

  /// Whether a generation was entered by all: a process that fails is then replaced.
  bool established() const { return state_.established; }
  int64_t generation() const { return state_.formed; }
  const Peers& peers() const { return peers_; }
  /// Whether this process was let go, or the job was done with it: it should end by itself.
  bool has_finished(int slot, int pid) const { return finished_.count({slot, pid}) > 0; }

 private:
  enum class Phase { Returning, Gathering, Entering, Running, Over };
  using Stage = membership::Stage;
  /// How often a step was lost: a step that no attempt gets through ends the job.
  struct Repeats {
    bool in_step = false;  // the generation that is being gathered lost a member while it trained
    int64_t step = -1;
    int losses = 0;
    std::string first;  // cause
  };

  void take(Time now, Connection from, const membership::Hello& hello);
  void take(Time now, Connection from, const membership::Back& back);
  void accuse(Time now, ProcessId by, const std::vector<ProcessId>& accused);
  void pass_until(Time now);
  void postpone(Time late);
  void take_again(Time now, Peer& known, Connection from, const membership::Hello& hello);
  Peer& move(Time now, Peer& known, Connection to);
  void refuse_second_process(Time now, Peer& first);
  void repeat_to(const Peer& peer);
  void greet(const Peer& peer);
  bool make_way(Time now, int slot);
  bool awaits_connection() const;
  static std::string closed_text(const Peer& peer);
  std::string without_it() const;
  void take(Time now, Peer& peer, const membership::Report& report);
  void take(Time now, Peer& peer, const membership::Lost& lost);
  void take(Time now, Peer& peer, const membership::Threw& threw);
  void take(Time now, Peer& peer, const membership::Store& store);
  void take(Time now, Peer& peer, const membership::Met& met);
  void take(Time now, Peer& peer, const membership::Entered& entered);
  void take(Time now, Peer& peer, const membership::Pauses& pauses);
  void take(Time now, Peer& peer, const membership::Alive& alive);
  void take(Time now, Peer& peer, const membership::Waits& waits);
  void take(Time now, Peer& peer, const membership::Leaves& leaves);
  void take(Time now, Peer& peer, const membership::Done& done);
  void drop_member(Time now, Connection connection, const std::string& why);
  void let_go(Connection connection);
  void gather(Time now, const std::string& why);
  void proceed(Time now);
  void resume(Time now);
  void try_to_form(Time now);
  bool may_go_without_sources() const;
  void go_without_sources();
  bool let_leavers_go(const std::vector<Peer*>& sources);
  void form(Time now, const std::vector<Peer*>& members, const std::vector<Peer*>& sources);
  void send_form(const std::vector<Peer*>& members, const membership::Form& before);
  bool is_third_loss_of(int64_t step);
  bool is_meeting_hopeless(const std::string& why);
  void check_entered(Time now);
  void check_pauses(Time now);
  bool end_if_done();
  void ask_for_change();
  void refuse(Connection connection, const CoordinatorMessage& why);
  void finish(int code, const std::string& why);
  void start_again(const std::string& why);
  void remember() { orders_.push_back(Remember{state_}); }
  void send_to_members(const CoordinatorMessage& message);
  void say_generation(Time now, bool begins);

  bool waits_for_first_ranks(Time now) const;
  int wanted_ranks() const;
  std::vector<Peer*> best_sources();
  std::vector<Peer*> candidates();
  int free_slot() const;
  Time report_limit(const Peer& peer) const;

  const MembershipLimits limits_;
  bool launched_ = true;
  Phase phase_ = Phase::Gathering;
  Time now_{0};                       // of the last event
  std::optional<Time> look_by_;       // when on_time() is due
  Time since_{0};                     // when the phase began
  std::optional<Time> waits_since_;   // for members: since one is ready
  std::optional<Time> paused_since_;  // the first member of a planned change
  std::optional<Time> done_since_;    // the first member
  Remembered state_;
  Peers peers_;
  bool change_may_be_due_ = false;             // a process has come or wants to leave
  std::map<std::pair<int, int>, Time> dying_;  // by slot and pid: killed, and not reaped yet
  std::set<std::pair<int, int>> finished_;     // slot and pid
  std::set<ProcessId> dropped_;                // members whose old lines may still come
  std::set<ProcessId> left_;                   // the same, of processes that were let go
  std::string first_throw_;
  std::string why_;  // of the generation that is being gathered
  Repeats repeats_;
  int failed_meetings_ = 0;  // in a row, in which no member was lost
  membership::Form form_;    // the last one
  std::string store_;        // of that generation; "": not told yet
  std::string joined_;       // slots of the generation that was formed, for a line
  std::vector<Order> orders_;
};

}  // namespace ddp::launch
