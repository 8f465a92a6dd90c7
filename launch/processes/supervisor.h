#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "launch/environment.h"
#include "launch/fd.h"
#include "launch/options.h"
#include "launch/output/output.h"
#include "launch/processes/death_watch.h"

namespace ddp::launch {

/// Runs the ranks of one host: starts them, carries their output, and ends them together.
///
/// One thread, one loop over poll. The job goes through the states in order, and may skip any:
///
///   Running   until a rank fails, also on another host, a signal comes, the reader of the output
///             closes it, or all ranks end
///   Ending    all were sent a signal and have the grace period to end
///   Killing   all are sent SIGKILL until none is left
///   Done      nothing that the ranks started runs any more
///
/// The job is every process below this one, so this process has to be a subreaper (`run_guarded`
/// makes it one): a rank's own children are ended with it wherever they moved.
class Supervisor {
 public:
  /// \param attempt  the attempt to run: a Supervisor runs one.
  /// \param lifeline  read end of a pipe; when it ends, everything is killed at once.
  Supervisor(const LaunchOptions& options, const Attempt& attempt, int lifeline);

  /// Runs the attempt to its end.
  ///
  /// \return ddprun's exit code: that of the first rank to fail, 128 + the number of the signal
  ///         that ended it or the job, 0 when every rank exited with 0.
  /// \throws CannotExecute  when the program cannot be executed; the guard then ends ranks that
  ///         run.
  int run();
  /// Whether a restart makes sense: a rank failed, and no signal ended the job.
  bool rank_failed() const { return rank_failed_ && signals_taken_ == 0; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { Running, Ending, Killing, Done };

  struct Rank {
    int global_rank;
    int local_rank;
    pid_t pid;
    bool alive;
    bool stopped = false;  // by SIGSTOP and the like
  };

  void start_ranks();
  void wait_for_event();
  void handle_signals();
  void check_lifeline();
  void check_other_hosts();
  void reap_ended();
  void check_stops();
  void copy_output();
  void advance();

  void on_signal(int signal);
  void on_rank_end(Rank& rank, int status);
  void end_stall();
  void begin_ending(int signal, std::chrono::milliseconds grace);
  void begin_killing();
  void send_to_job(int signal);
  void finish_output();

  Rank* find_alive(pid_t pid);
  int count_alive() const;
  bool only_stopped_ranks_are_left() const;
  std::string names_of_running() const;

  const LaunchOptions options_;
  const Attempt attempt_;
  const int lifeline_;
  bool lifeline_is_open_ = true;  // until the lifeline ends
  Fd signals_;
  DeathWatch deaths_;
  Output output_;
  std::vector<Rank> ranks_;
  State state_ = State::Running;
  Clock::time_point deadline_;                       // for Ending and Killing
  std::optional<Clock::time_point> stall_deadline_;  // set while only stopped ranks are left
  bool any_children_ = true;                         // as of the last reap_ended
  std::vector<int> sent_signals_;                    // sent to the whole job
  int signals_taken_ = 0;                            // not counting signals that are only forwarded
  int exit_code_ = 0;
  bool rank_failed_ = false;
};

}  // namespace ddp::launch
