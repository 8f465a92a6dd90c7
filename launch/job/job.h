#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/membership/membership.h"
#include "launch/options.h"

namespace ddp::launch {

/// Decides for a whole job which processes are started, replaced and ended.
///
/// Launchers and members are clients that speak in lines:
///
///   launcher  host TOKEN ELASTIC NODE NODES RANKS RESTARTS HELD
///             started RANK PID | exited RANK PID CODE ASKED HOW | gone | signal NUMBER |
///             notice NUMBER | bye
///             (of a rank that could not be started, PID is 0)
///   job       node NODE RANKS... (of each host) | start NUMBER PORT |
///             replace RANK NUMBER PORT | kill RANK PID | stop | say TEXT |
///             finish CODE MILLISECONDS TEXT
///
///   Joining   a job that restarts as a whole begins once all its launchers are there
///   Training  a rank that fails ends the attempt, and all ranks start again. In an elastic job
///             the rank is replaced, once a first generation was entered
///   Stopping  all processes are ended, to start again
///   Draining  the members are done, and their processes end by themselves
///   Over      `exit_code` is set, and "finish" was sent to all launchers
///
/// In a rendezvous launchers come with NODE -1 and get their numbers before the first start.
///
/// Membership decides who trains in an elastic job; this starts the processes for it, and counts
/// them. It has no sockets and no clock.
class Job {
 public:
  using Time = Membership::Time;
  using Client = Membership::Connection;

  /// How the job reaches its clients.
  struct Wires {
    std::function<void(Client, const std::string&)> send;
    std::function<void(Client)> close;
    std::function<void(Client)> watch;                // closes it when its host is lost
    std::function<void(const Remembered&)> remember;  // throws where it cannot
    std::function<int()> new_port;                    // a MASTER_PORT that is free
    std::function<std::string(Client)> reached_at;    // this host's address on the way to it
    std::function<void(const std::string&)> say;      // to this process's user
  };

  /// \param token  keeps clients of other jobs out.
  Job(const LaunchOptions& options, std::string token, Wires wires, Time now,
      std::optional<Remembered> remembered = {});

  void on_line(Time now, Client client, const std::string& line);
  void on_closed(Time now, Client client);
  void on_time(Time now);
  std::optional<Time> next_time() const;

  bool is_launcher(Client client) const { return launchers_.count(client) > 0; }
  std::optional<int> exit_code() const { return exit_code_; }

 private:
  enum class State { Joining, Training, Stopping, Draining, Over };
  struct Launcher {
    int node = 0;  // -1: it has no number yet
    int ranks = 0;
    std::map<int, int> running;  // pids by rank
    bool starting = false;       // until its first process is there
    bool ending = false;         // until it has sent "gone"
    bool leaving = false;        // starts no rank any more
  };
  struct Exit {
    int rank = 0;
    int pid = 0;
    int code = 0;
    bool asked = false;  // the launcher, or this job, had asked it to end
    std::string how;
    std::string report() const;
  };

  void ask_to_leave(int slot);
  void close(Client client);
  void admit(Client client, const std::string& line);
  std::string reason_to_refuse(
      const Launcher& launcher, bool elastic, int nodes, int restarts) const;
  std::string reason_without_place(const Launcher& launcher) const;
  void refuse_other_job(Client client, const std::string& id, bool is_new);
  int free_node() const;
  void number_hosts();
  void take_from_launcher(Client client, const std::string& line);
  void on_exited(Client client, const Exit& exit);
  void on_member_exited(Client client, const Exit& exit);
  void on_signal(Client client, int signal);
  std::string text_of_missing() const;
  void begin_attempts();
  void begin_attempt(Client client);
  void begin_again_if_all_gone();
  void replace(Client client, const Exit& exit);
  bool dies_again_and_again(int rank);
  void fail(Client client, const Exit& exit);
  bool leaves(const Exit& exit) const;
  void let_leave(Client client, const Exit& exit);
  void start_all_again(int code);
  void say_of_another_host(Client origin);
  void finish(
      int code, const std::string& why, int64_t limit_ms = 0, std::optional<Client> origin = {});
  void finish_if_all_ended();
  void end_those_that_came_late();
  void apply_orders();
  void remember(const Remembered& state);
  void renew(std::optional<Remembered> remembered = {});
  void count_launchers();
  void send_reachable_address(Client member);
  int running() const;
  void tell(const std::string& text);
  void send_to_launchers(const std::string& line);
  MembershipLimits limits() const;

  LaunchOptions options_;  // a rendezvous fills in the ranks of each host
  const std::string token_;
  const Wires wires_;
  const Time start_;
  Time now_;               // of the last event
  Time stop_deadline_{0};  // of Stopping
  State state_ = State::Training;
  std::optional<Membership> membership_;  // of an elastic job; none: between two attempts
  std::map<Client, Launcher> launchers_;
  std::set<Client> members_;
  std::set<Client> closed_;                  // by this job; what they sent before is dropped
  std::set<int> leaving_;                    // ranks that are not replaced
  std::string remember_error_;               // of the last attempt; "": none
  std::map<int, std::vector<Time>> deaths_;  // by rank
  int restarts_ = 0;
  int port_ = 0;
  int seen_launchers_ = 0;
  int lost_launchers_ = 0;  // without a word: their processes may run
  int code_ = 0;            // of the rank that failed
  std::set<int> notices_;   // signals by which the ranks of this attempt were told to leave
  std::set<std::string> refused_ids_;  // of hosts that came, and are of another job
  std::optional<int> exit_code_;
};

}  // namespace ddp::launch
