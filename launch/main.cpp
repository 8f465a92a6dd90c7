#include <cstdio>
#include <exception>
#include <iostream>
#include <optional>

#include "launch/fd.h"
#include "launch/guard.h"
#include "launch/options.h"
#include "launch/reserved_port.h"
#include "launch/spawn.h"
#include "launch/supervisor.h"

namespace {

using namespace ddp::launch;

constexpr int kLauncherFailed = 1;

void complain(const std::exception& error) { std::fprintf(stderr, "ddprun: %s\n", error.what()); }

int supervise(const LaunchOptions& options, int master_port, int lifeline) {
  try {
    return Supervisor(options, master_port, lifeline).run();
  } catch (const CannotExecute& error) {
    complain(error);
    return error.exit_code();
  } catch (const std::exception& error) {
    complain(error);
    return kLauncherFailed;
  }
}

int launch(const LaunchOptions& options) {
  open_missing_standard_fds();
  // Held until the job has ended.
  std::optional<ReservedPort> reserved;
  int port = options.master_port;
  if (port == 0) port = reserved.emplace().port();
  return run_guarded([&](int lifeline) { return supervise(options, port, lifeline); });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const ParsedOptions parsed = parse_options(argc, argv, std::cout, std::cerr);
    return parsed.options ? launch(*parsed.options) : parsed.exit_code;
  } catch (const std::exception& error) {
    complain(error);
    return kLauncherFailed;
  }
}
