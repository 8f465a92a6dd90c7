#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/membership/membership.h"
#include "launch/options.h"

namespace ddp::launch {

/// Decides for a whole elastic job which processes are started, replaced and ended.
///
/// Launchers and members are clients that speak in lines. Membership decides who trains; this
/// starts the processes for it, and counts them:
///
///   launcher  host TOKEN RANKS HELD | started SLOT PID | exited SLOT PID CODE HOW | gone
///             signal NUMBER | bye
///   job       start NUMBER PORT | replace SLOT NUMBER PORT | kill SLOT PID | stop | say TEXT
///             finish CODE MILLISECONDS TEXT
///
///   Training  processes are replaced once a first generation was entered; before that, all start
///             again, and so does a program that does not speak
///   Stopping  all processes are ended, to start again
///   Draining  the members are done, and their processes end by themselves
///   Over      `exit_code` is known, and all launchers were told
///
/// It has no sockets and no clock.
class ElasticJob {
 public:
  using Time = Membership::Time;
  using Client = Membership::Connection;

  /// How the job reaches its clients.
  struct Wires {
    std::function<void(Client, const std::string&)> send;
    std::function<void(Client)> close;
    std::function<void(const Remembered&)> remember;
    std::function<int()> new_port;                  // a MASTER_PORT that is free
    std::function<std::string(Client)> reached_at;  // this host's address on the way to it
    std::function<void(const std::string&)> say;    // to this process's user
  };

  ElasticJob(
      const LaunchOptions& options, std::string token, Wires wires, Time now,
      std::optional<Remembered> remembered = {});

  void on_line(Time now, Client client, const std::string& line);
  void on_closed(Time now, Client client);
  void on_time(Time now);
  std::optional<Time> next_time() const;

  bool is_launcher(Client client) const { return launchers_.count(client) > 0; }
  std::optional<int> exit_code() const { return exit_code_; }

 private:
  enum class State { Training, Stopping, Draining, Over };
  struct Launcher {
    int ranks = 0;
    std::map<int, int> running;  // pids by slot
    bool starting = false;       // until its first process is there
  };
  void take_from_launcher(Time now, Client client, const std::string& line);
  void admit_launcher(Client client, const std::string& line);
  void on_exited(Time now, Launcher& launcher, const std::string& words);
  void on_signal(Time now, Client client, int signal);
  void on_gone(Time now, Client client);
  void begin_again_if_all_gone(Time now);
  void replace(Time now, Client client, int slot, const std::string& report, int code);
  bool dies_again_and_again(Time now, int slot);
  void start_all_again(Time now, const std::string& report, int code);
  void begin_attempt(Client client);
  void finish(int code, const std::string& why, int64_t limit_ms = 0);
  void end_those_that_came_late();
  void finish_if_all_ended();
  void obey_membership(Time now);
  void count_launchers();
  void tell_address(Client member);
  int running() const;
  void tell(const std::string& text);
  void send_to_launchers(const std::string& line);
  MembershipLimits limits() const;

  const LaunchOptions options_;
  const std::string token_;
  const Wires wires_;
  State state_ = State::Training;
  std::optional<Membership> membership_;  // none: between two attempts
  std::map<Client, Launcher> launchers_;
  std::set<Client> members_;
  std::set<int> leaving_;                    // slots that are not replaced
  std::map<int, std::vector<Time>> deaths_;  // by slot
  int restarts_ = 0;
  int port_ = 0;
  int seen_launchers_ = 0;
  int lost_launchers_ = 0;  // without a word: their processes may run
  int code_ = 0;            // of the process that ended badly while Draining
  std::optional<int> exit_code_;
};

}  // namespace ddp::launch
