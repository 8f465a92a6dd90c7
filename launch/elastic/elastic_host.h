#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/membership/line_channel.h>
#include <poll.h>
#include <sys/types.h>

#include "launch/elastic/carrier.h"
#include "launch/environment.h"
#include "launch/fd.h"
#include "launch/options.h"
#include "launch/output/output.h"
#include "launch/processes/death_watch.h"

namespace ddp::launch {

using membership::LineChannel;

/// Where an elastic job's coordinator listens.
struct CoordinatorAddress {
  std::string host;
  int port;
  std::string token;
};

/// Runs one host's ranks of an elastic job: starts, replaces and ends what the job says.
///
/// One thread, one loop over poll, in which the job's coordinator works, too, where it is here.
///
///   Running    the job's lines are followed
///   Leaving    ddprun got SIGTERM, and the ranks leave after their step
///   Coordinating  they have left, and the coordinator that is here serves the other hosts
///   Finishing  the ranks were told that the job is over
///   Ending     all were sent a signal and have the grace period to end
///   Killing    all are sent SIGKILL until none is left
///   Done       nothing that the ranks started runs any more
class ElasticHost {
 public:
  /// \param own  the coordinator, if it is here; may be null.
  /// \param lifeline  read end of a pipe; when it ends, everything is killed at once.
  ElasticHost(
      const LaunchOptions& options, CoordinatorAddress coordinator, Carrier* own, int lifeline);

  /// \return ddprun's exit code.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { Running, Leaving, Coordinating, Finishing, Ending, Killing, Done };
  struct Rank {
    int slot;
    int local_rank;
    pid_t pid;
    int output;  // its place in output_
  };

  void connect();
  void wait_for_event();
  void handle_signals();
  void check_lifeline();
  void follow_job();
  void follow(const std::string& line);
  void reap_ended();
  void advance();

  void start(int local_rank, int number, int port);
  void on_signal(int signal);
  void on_rank_end(pid_t pid, int status);
  void on_all_gone();
  void begin_ending(int signal);
  void begin_killing();
  void send_to_job_processes(int signal);
  void finish_output();
  void send(const std::string& line);
  int first_slot() const { return global_rank(options_, 0); }

  const LaunchOptions options_;
  const CoordinatorAddress coordinator_;
  Carrier* const own_;
  const int lifeline_;
  bool lifeline_is_open_ = true;
  Fd signals_;
  Fd null_;
  DeathWatch deaths_;
  Output output_;
  int outputs_ = 0;  // ranks that output_ has had
  LineChannel job_;
  bool has_joined_ = false;
  Clock::time_point next_connect_;
  std::vector<std::string> unsent_;  // ends of ranks that the job does not know
  std::vector<Rank> ranks_;          // that run
  State state_ = State::Running;
  bool stops_only_ = false;  // to start again
  bool leaves_ = false;      // the other hosts go on
  Clock::time_point deadline_;
  bool any_children_ = false;
  int signals_taken_ = 0;
  int exit_code_ = 0;
};

}  // namespace ddp::launch
