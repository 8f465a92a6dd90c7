#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/membership/line_channel.h>
#include <ddp/internal/system/fd.h>

#include "launch/environment.h"
#include "launch/hosts/orders.h"
#include "launch/job/coordinator.h"
#include "launch/options.h"
#include "launch/output/output.h"
#include "launch/processes/rank_processes.h"

namespace ddp::launch {

/// Runs the ranks of one host: starts, replaces and ends them by the job's lines, and carries their
/// output.
///
/// One thread, one loop over poll, in which the job's coordinator works, too, where it is here.
///
///   Running       the job's lines are followed
///   Leaving       ddprun got SIGTERM, and the ranks of an elastic job leave after their step
///   Coordinating  they have left, and the coordinator that is here serves the other hosts
///   Finishing     the job is over, and its ranks have a while to end by themselves
///   Ending        all were sent a signal and have the grace period to end
///   Killing       all are sent SIGKILL until none is left
///   Done          nothing that the ranks started runs any more
class HostLoop {
 public:
  /// \param coordinator  where it is.
  /// \param own  the coordinator, if it is here; may be null.
  /// \param lifeline  read end of a pipe; when it ends, everything is killed at once.
  HostLoop(
      const LaunchOptions& options, membership::Address coordinator, Coordinator* own,
      int lifeline);

  /// Runs the job to its end.
  ///
  /// \return ddprun's exit code: that of the first rank to fail, 128 + the number of the signal
  ///         that ended it or the job, 0 when every rank exited with 0.
  /// \throws CannotExecute  when the program cannot be executed; the guard then ends ranks that
  ///         run.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  using Address = membership::Address;
  using LineChannel = membership::LineChannel;
  enum class State { Running, Leaving, Coordinating, Finishing, Ending, Killing, Done };
  /// The next step once no process is left.
  enum class Next { Exit, StartAgain, Coordinate };

  void loop();
  void finish();
  void connect();
  void introduce();
  void wait_for_event();
  void handle_signals();
  void check_lifeline();
  void copy_output();
  void reap_ended();
  void check_stops();
  size_t follow_job();
  void follow(const std::string& line);
  void obey_orders();
  void check_connection();
  void advance();

  void start(int local_rank, const Attempt& attempt);
  void replace(int rank, const Attempt& attempt);
  void report_failed_starts();
  void on_signal(int signal);
  void on_finish(int code, std::chrono::milliseconds limit);
  void on_all_gone();
  void begin_leaving();
  void begin_ending(int signal, std::chrono::milliseconds grace);
  void begin_killing();
  void send_to_ranks(int signal);
  void end_stall();
  void finish_output();
  bool was_asked(int code) const;
  std::chrono::milliseconds grace_or(std::chrono::milliseconds by_default) const;

  LaunchOptions options_;  // a rendezvous fills in this host's place
  const Address coordinator_;
  Coordinator* const own_;
  const int lifeline_;
  bool lifeline_is_open_ = true;
  Fd signals_;
  std::optional<Orders> orders_;  // of a ddprun that started this one
  Fd null_;
  RankProcesses processes_;
  Output output_;
  int outputs_ = 0;  // ranks that output_ has had
  LineChannel job_;
  bool has_joined_ = false;
  Clock::time_point next_connect_;
  struct FailedStart {
    int rank;
    std::string why;
    Clock::time_point report_at;
  };
  std::vector<FailedStart> failed_starts_;
  std::vector<std::string> unsent_;  // lines about ended ranks, while there is no connection
  State state_ = State::Running;
  Next next_ = Next::Exit;
  Clock::time_point deadline_;
  std::optional<Clock::time_point> answer_deadline_;  // set until node 0's first word
  std::optional<Clock::time_point> stall_deadline_;   // set while only stopped ranks are left
  std::vector<int> sent_signals_;                     // to all ranks, since they were started
  bool hung_up_ = false;                              // the client of orders_ is gone
  int signals_taken_ = 0;                             // without the signals only forwarded
  int exit_code_ = 0;
};

}  // namespace ddp::launch
