#include "launch/processes/attempts.h"

#include <cstdio>
#include <optional>
#include <variant>

#include "launch/elastic/run_elastic.h"
#include "launch/hosts/host.h"
#include "launch/hosts/reserved_port.h"
#include "launch/processes/supervisor.h"

namespace ddp::launch {
namespace {

int run_on_one_host(const LaunchOptions& options, int lifeline) {
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

int run_on_several_hosts(const LaunchOptions& options, int lifeline) {
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

}  // namespace

int run_attempts(const LaunchOptions& options, int lifeline) {
  if (options.elastic) return run_elastic(options, lifeline);
  const bool together = options.nodes > 1 && options.max_restarts > 0;
  return together ? run_on_several_hosts(options, lifeline) : run_on_one_host(options, lifeline);
}

}  // namespace ddp::launch
