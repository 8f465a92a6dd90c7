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

#include <sys/prctl.h>
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
#include "launch/processes/process_tree.h"
#include "launch/processes/signals.h"
#include "launch/processes/spawn.h"
#include "launch/texts.h"

namespace {

using namespace ddp;
using namespace ddp::launch;

constexpr int kLauncherFailed = 1;
constexpr std::chrono::seconds kKillLimit(2);

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

/// Passes signals on to `child` until it has ended; returns its wait status.
int forward_signals_until_end(pid_t child, const sigset_t& signals) {
  for (;;) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal < 0) continue;  // ddprun was stopped and continued
    if (signal != SIGCHLD) {
      ::kill(child, signal);
      continue;
    }
    if (const auto status = reap(child, WNOHANG)) return *status;
  }
}

/// Runs the job in a child process and makes sure that no process of the job outlives either
/// process.
///
/// Two processes watch each other, so that an orphan is left only if both are killed at once. This
/// process, whose id the user sees, forwards the awaited signals to the job and waits for it. When
/// the job's process dies, the processes that it started become children of this one
/// (PR_SET_CHILD_SUBREAPER) and are killed. The job reads from a lifeline, which ends when this
/// process dies, even from SIGKILL; the job is a subreaper, too. It has a session and a name of its
/// own, so a kill of this process's group or of its name does not reach it.
///
/// Must be called while the process has one thread.
///
/// \return the job's exit code; 128 + the signal's number if its process was killed.
/// \throws std::system_error  when no process can be started.
int run_guarded(const LaunchOptions& options) {
  const sigset_t signals = awaited_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  // The process that started ddprun may ignore SIGCHLD; then the kernel would report no child's
  // end.
  ::signal(SIGCHLD, SIG_DFL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Pipe lifeline = make_pipe();

  const pid_t child = ::fork();
  if (child < 0) throw_errno("cannot start a process");
  if (child == 0) {
    lifeline.write.reset();
    ::setsid();
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    ::prctl(PR_SET_NAME, "ddp-supervisor");
    ::_exit(supervise(options, lifeline.read.get()));
  }
  lifeline.read.reset();

  const int status = forward_signals_until_end(child, signals);
  std::string left;
  for (const Process& process : kill_descendants(kKillLimit)) {
    left += " " + std::to_string(process.pid);
  }
  if (!left.empty()) {
    std::fprintf(stderr, "ddprun: SIGKILL has not ended these processes yet:%s\n", left.c_str());
  }
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(
      stderr, "ddprun: its supervisor was killed by signal %d (%s); ended all ranks\n",
      WTERMSIG(status), signal_name(WTERMSIG(status)).c_str());
  return 128 + WTERMSIG(status);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const ParsedOptions parsed = parse_options(argc, argv, std::cout, std::cerr, std::getenv);
    if (!parsed.options) return parsed.exit_code;
    open_missing_standard_fds();
    return run_guarded(*parsed.options);
  } catch (const std::exception& error) {
    print_error(error);
    return kLauncherFailed;
  }
}
