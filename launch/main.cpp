#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>
#include <variant>

#include "launch/fd.h"
#include "launch/hosts/host.h"
#include "launch/hosts/reserved_port.h"
#include "launch/options.h"
#include "launch/processes/guard.h"
#include "launch/processes/spawn.h"
#include "launch/processes/supervisor.h"

namespace {

using namespace ddp::launch;

constexpr int kLauncherFailed = 1;

void print_error(const std::exception& error) {
  std::fprintf(stderr, "ddprun: %s\n", error.what());
}

/// Starts the ranks until they succeed, or no restart is left.
int run_attempts(const LaunchOptions& options, int lifeline) {
  for (int number = 0;; ++number) {
    // Held until the attempt has ended. Each attempt has a new port, so that connections left over
    // from an earlier attempt cannot reach it.
    std::optional<ReservedPort> reserved;
    int port = options.master_port;
    if (port == 0) port = reserved.emplace().port();
    Supervisor supervisor(options, {number, port}, lifeline);
    const int exit_code = supervisor.run();
    if (exit_code == 0 || !supervisor.rank_failed()) return exit_code;
    if (number == options.max_restarts) {
      if (number > 0) std::fprintf(stderr, "ddprun: gave up: no restart of %d is left\n", number);
      return exit_code;
    }
  }
}

/// Does the same on several hosts, which agree on each attempt.
int run_attempts_together(const LaunchOptions& options, int lifeline) {
  Host host(options, lifeline);
  int exit_code = 0;
  for (;;) {
    const auto next = host.next_attempt();
    if (const auto* end = std::get_if<Host::End>(&next)) {
      // no report: node 0 sees the connection end
      return exit_code != 0 ? exit_code : end->exit_code;
    }
    Supervisor supervisor(options, std::get<Attempt>(next), lifeline);
    exit_code = supervisor.run();
    host.report(exit_code, supervisor.rank_failed());
  }
}

int supervise(const LaunchOptions& options, int lifeline) {
  try {
    const bool together = options.nodes > 1 && options.max_restarts > 0;
    return together ? run_attempts_together(options, lifeline) : run_attempts(options, lifeline);
  } catch (const CannotExecute& error) {
    print_error(error);
    return error.exit_code();
  } catch (const std::exception& error) {
    print_error(error);
    return kLauncherFailed;
  }
}

int launch(const LaunchOptions& options) {
  open_missing_standard_fds();
  return run_guarded([&](int lifeline) { return supervise(options, lifeline); });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const ParsedOptions parsed = parse_options(argc, argv, std::cout, std::cerr);
    return parsed.options ? launch(*parsed.options) : parsed.exit_code;
  } catch (const std::exception& error) {
    print_error(error);
    return kLauncherFailed;
  }
}
