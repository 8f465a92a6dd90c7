// ddprun: a process that guards, and below it one that runs this host's part of the job.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/system/host.h>

#include "launch/engine.h"
#include "launch/hosts/hosts_loop.h"
#include "launch/hosts/orders.h"
#include "launch/hosts/remote_command.h"
#include "launch/job/coordinator.h"
#include "launch/job/host_loop.h"
#include "launch/job/ports.h"
#include "launch/options.h"
#include "launch/pipe.h"
#include "launch/poll_until.h"
#include "launch/pretend/calls_run.h"
#include "launch/processes/guard.h"
#include "launch/processes/signals.h"
#include "launch/processes/spawn.h"
#include "launch/texts.h"

namespace {

using namespace ddp;
using namespace ddp::launch;

constexpr int kLauncherFailed = 1;

std::string random_token() {
  std::random_device random;
  char text[32];
  std::snprintf(text, sizeof(text), "%08x%08x", random(), random());
  return text;
}

/// Waits for the end of the job, or a signal.
int coordinate(const LaunchOptions& options, int lifeline) {
  const auto& elastic = *options.elastic;
  const auto token = elastic.token.empty() ? random_token() : elastic.token;
  Coordinator coordinator(options, token, elastic.coordinate);
  const auto address = membership::text_of({host_name(), coordinator.port(), token});
  std::printf("DDP_COORDINATOR=%s\n", address.c_str());
  std::fflush(stdout);
  const Fd signals = open_signals(awaited_signals());
  while (!coordinator.exit_code()) {
    std::vector<pollfd> waited = {{signals.get(), POLLIN, 0}, {lifeline, POLLIN, 0}};
    coordinator.add_to(waited);
    poll_until(waited, coordinator.next_time());
    while (const auto signal = next_signal(signals.get())) {
      const bool ends = *signal != SIGCHLD && *signal != SIGWINCH && !is_only_forwarded(*signal);
      if (ends) return 128 + *signal;
    }
    if (waited[1].revents != 0) return 128 + SIGKILL;
    coordinator.serve();
  }
  coordinator.finish_sending();
  return *coordinator.exit_code();
}

int run_on_hosts(LaunchOptions options, int lifeline) {
  if (options.job_id.empty() && options.elastic) options.job_id = options.elastic->token;
  if (options.job_id.empty()) options.job_id = random_token();
  return HostsLoop(options, lifeline).run();
}

/// Names the port of the endpoint to the ddprun that started this one, where it gave none.
void print_port(const LaunchOptions& options, int port) {
  if (!options.obeys_stdin || options.nodes == 1 || options.master_port != 0) return;
  const Orders raw(STDIN_FILENO);  // from here on a terminal changes no bytes
  std::fputs(port_line(port).c_str(), stdout);
  std::fflush(stdout);
}

/// Makes the coordinator of a job, if it is to be here.
///
/// In a rendezvous several hosts, and several ddpruns of one host, may have the endpoint's address:
/// the first one to listen there is node 0, and the others get a null pointer.
std::unique_ptr<Coordinator> coordinator_here(
    const LaunchOptions& options, const std::string& token, std::optional<int> port) {
  try {
    return std::make_unique<Coordinator>(options, token, port);
  } catch (const std::system_error& error) {
    if (!options.rendezvous || error.code() != std::errc::address_in_use) throw;
    return nullptr;
  }
}

/// Runs this host's part of a job, the coordinator alone, or both.
///
/// \param lifeline  the launcher's end of a pipe that ends the ranks with it: see run_guarded().
/// \return the launcher's exit code.
int run_job(LaunchOptions options, int lifeline) {
  if (options.hosts) return run_on_hosts(std::move(options), lifeline);
  const auto elastic = options.elastic.value_or(ElasticOptions());
  if (elastic.coordinate != 0) return coordinate(options, lifeline);
  if (!elastic.coordinator.empty()) {
    const auto address = membership::parse_address(elastic.coordinator);
    return HostLoop(options, address, nullptr, lifeline).run();
  }
  const bool several = hosts_that_agree(options) > 1;
  auto token = elastic.token.empty() ? options.job_id : elastic.token;
  if (token.empty()) token = several ? kUnknownJob : random_token();
  std::optional<int> port;  // none: this host's ddprun is the only client
  if (several) port = options.master_port;
  if (options.elastic && !several) port = 0;

  std::optional<ReservedPort> reserved;
  const bool is_alone = !several && options.nodes > 1;  // decides nothing with the other hosts
  if (is_alone && options.node_rank == 0 && options.master_port == 0) {
    print_port(options, reserved.emplace().port());
    options.master_port = reserved->port();
  }
  const bool may_be_first = options.rendezvous
                                ? options.is_first_host.value_or(is_own_host(options.master_addr))
                                : options.node_rank == 0 || !several;
  const auto coordinator = may_be_first ? coordinator_here(options, token, port) : nullptr;
  if (!coordinator) {
    return HostLoop(options, {options.master_addr, options.master_port, token}, nullptr, lifeline)
        .run();
  }
  options.node_rank = std::max(options.node_rank, 0);
  if (several) print_port(options, coordinator->port());
  return HostLoop(
             options, {loopback_address(), coordinator->port(), token}, coordinator.get(), lifeline)
      .run();
}

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

/// \return the job's exit code; 128 + the signal's number if its process was killed.
/// \throws std::system_error  when no process can be started.
int guard(const LaunchOptions& options) {
  const auto end = run_guarded([&](int lifeline) { return supervise(options, lifeline); });
  std::string left;
  for (const Process& process : end.left) left += " " + std::to_string(process.pid);
  if (!left.empty()) {
    std::fprintf(stderr, "ddprun: SIGKILL has not ended these processes yet:%s\n", left.c_str());
  }
  if (WIFEXITED(end.status)) return WEXITSTATUS(end.status);
  std::fprintf(
      stderr, "ddprun: its supervisor was killed by signal %d (%s); ended all ranks\n",
      WTERMSIG(end.status), signal_name(WTERMSIG(end.status)).c_str());
  return 128 + WTERMSIG(end.status);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const ParsedOptions parsed = parse_options(argc, argv, std::cout, std::cerr, std::getenv);
    if (!parsed.options) return parsed.exit_code;
    open_missing_standard_fds();
    return run_with_calls(*parsed.options, guard);
  } catch (const std::exception& error) {
    print_error(error);
    return kLauncherFailed;
  }
}
