#pragma once

#include <optional>
#include <stdexcept>
#include <variant>

#include "launch/environment.h"
#include "launch/fd.h"
#include "launch/hosts/coordinator.h"
#include "launch/hosts/line_socket.h"
#include "launch/options.h"

namespace ddp::launch {

/// Joins this host to a job of several hosts that restart together.
class Host {
 public:
  /// Opens the endpoint for the other hosts on node 0.
  ///
  /// \param lifeline  as Supervisor's; its end stops waiting, and so does a signal that ends
  ///        ddprun.
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

  /// Reports how this host's ranks ended. Call `next_attempt` after it.
  void report(int exit_code, bool restartable);

 private:
  /// Waits for at most `wait_ms`.
  ///
  /// \param fd  stops the wait, too, when it is readable; -1: none.
  /// \return the number of the signal that came (SIGKILL: the lifeline ended), or 0.
  int wait(int fd, int wait_ms) const;
  int join();

  const LaunchOptions options_;
  const int lifeline_;
  Fd signals_;
  std::optional<Coordinator> coordinator_;  // on node 0
  LineSocket socket_;                       // destroyed before coordinator_, which waits for it
};

}  // namespace ddp::launch
