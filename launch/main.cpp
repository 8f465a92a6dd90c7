#include <cstdio>
#include <exception>
#include <iostream>

#include "launch/job/run_job.h"
#include "launch/options.h"
#include "launch/pipe.h"
#include "launch/processes/guard.h"
#include "launch/processes/spawn.h"

namespace {

using namespace ddp::launch;

constexpr int kLauncherFailed = 1;

void print_error(const std::exception& error) {
  std::fprintf(stderr, "ddprun: %s\n", error.what());
}

int supervise(const LaunchOptions& options, int lifeline) {
  try {
    return run_job(options, lifeline);
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
