#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ddp/internal/system/fd.h>

#include "launch/environment.h"
#include "launch/hosts/orders.h"
#include "launch/options.h"
#include "launch/output/output.h"
#include "launch/processes/rank_processes.h"

namespace ddp::launch {

/// Finds the line that names node 0's port among the first lines of its output.
class PortLine {
 public:
  /// \return the bytes without that line.
  std::string filter(std::string_view bytes);
  /// 0: it has not come.
  int port() const { return port_; }

 private:
  int port_ = 0;
  std::string held_;  // a line without its end
};

/// Starts a ddprun on each host of a job by a client such as ssh, carries their output, and ends
/// all when one fails.
///
/// Node 0's ddprun is started first, and names the port of the endpoint; the others get it. The
/// clients' standard input carries orders. When it ends, with its client or with this process, the
/// host's ddprun ends its ranks.
class HostsLoop {
 public:
  /// \param options  with `hosts`.
  /// \param lifeline  read end of a pipe; when it ends, all clients are killed at once.
  HostsLoop(const LaunchOptions& options, int lifeline);

  /// Runs the job to its end.
  ///
  /// \return ddprun's exit code: that of the first host to fail, or 128 + the number of the signal
  ///         that ended the job.
  /// \throws CannotExecute  when there is no such client; the guard then ends those that run.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { Running, Ending, Killing };

  void start_those_that_can();
  void start(int node, int port);
  void wait_for_event();
  void handle_signals();
  void on_signal(int signal);
  void check_lifeline();
  void copy_output();
  void reap_ended();
  void on_ended(int node, int status);
  void check_deadline();
  void send(const Order& order);
  void begin_ending();
  void begin_killing();
  void finish_output();
  std::string name_of(int node) const;
  std::string count_left() const;

  LaunchOptions options_;
  const HostsOptions hosts_;
  const int lifeline_;
  bool lifeline_is_open_ = true;
  Fd signals_;
  RankProcesses clients_;     // a "rank" is a node here
  std::map<int, Fd> orders_;  // by node
  Output output_;
  PortLine port_line_;  // of node 0
  int started_ = 0;
  State state_ = State::Running;
  Clock::time_point deadline_;
  bool noticed_ = false;   // the ranks may have been told to leave
  int signals_taken_ = 0;  // without the signals only forwarded
  int exit_code_ = 0;
};

}  // namespace ddp::launch
