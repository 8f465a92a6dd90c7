#pragma once

#include <optional>
#include <stdexcept>
#include <variant>

#include "launch/coordinator.h"
#include "launch/environment.h"
#include "launch/fd.h"
#include "launch/line_socket.h"
#include "launch/options.h"

namespace ddp::launch {

/// This host's place in a job of several hosts that restart together.
class Host {
 public:
  /// On node 0 it opens the endpoint for the others.
  ///
  /// \param lifeline  as Supervisor's; waiting ends with it, and with a signal that ends ddprun.
  Host(const LaunchOptions& options, int lifeline);

  /// How the job ended.
  struct End {
    int exit_code;
  };
  /// Waits until all hosts are ready, the first time at most 5 minutes.
  ///
  /// \return the attempt to run, or the job's end.
  /// \throws std::runtime_error  when node 0 cannot be reached, refuses this host, or is gone.
  std::variant<Attempt, End> next_attempt();

  /// Says how this host's ranks ended. `next_attempt` follows.
  void report(int exit_code, bool restartable);

 private:
  /// Signal number (SIGKILL: of the lifeline) that came within `wait_ms`, or 0.
  /// \param fd  ends the wait, too, when it is readable; -1: none.
  int wait(int fd, int wait_ms) const;
  int join();

  const LaunchOptions options_;
  const int lifeline_;
  Fd signals_;
  std::optional<Coordinator> coordinator_;  // on node 0
  LineSocket socket_;                       // closed before the coordinator is waited for
};

}  // namespace ddp::launch
