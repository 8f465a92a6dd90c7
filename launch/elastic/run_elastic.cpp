#include "launch/elastic/run_elastic.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <ddp/internal/system/host_name.h>
#include <ddp/internal/system/loopback.h>

#include "launch/elastic/carrier.h"
#include "launch/elastic/elastic_host.h"
#include "launch/processes/signals.h"

namespace ddp::launch {
namespace {

std::string random_token() {
  std::random_device random;
  char text[32];
  std::snprintf(text, sizeof(text), "%08x%08x", random(), random());
  return text;
}

CoordinatorAddress parse_address(const std::string& text) {
  const auto slash = text.find('/');
  const auto colon = text.rfind(':', slash);
  CoordinatorAddress address = {
      text.substr(0, colon), std::stoi(text.substr(colon + 1)), text.substr(slash + 1)};
  if (address.host.size() > 1 && address.host.front() == '[') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  return address;
}

/// Waits for the end of the job, or a signal.
int coordinate(const LaunchOptions& options, int lifeline) {
  const auto& elastic = *options.elastic;
  const auto token = elastic.token.empty() ? random_token() : elastic.token;
  Carrier carrier(options, token, elastic.coordinate);
  std::printf("DDP_COORDINATOR=%s:%d/%s\n", host_name().c_str(), carrier.port(), token.c_str());
  std::fflush(stdout);
  sigset_t signals = awaited_signals();
  for (const int signal : {SIGCHLD, SIGWINCH, SIGUSR1, SIGUSR2}) ::sigdelset(&signals, signal);
  const Fd signal_fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd) throw std::system_error(errno, std::generic_category(), "cannot await signals");
  while (!carrier.exit_code()) {
    std::vector<pollfd> waited = {{signal_fd.get(), POLLIN, 0}, {lifeline, POLLIN, 0}};
    carrier.add_to(waited);
    int timeout = -1;
    if (const auto next = carrier.next_time()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Carrier::Clock::now());
      timeout = std::max(0, static_cast<int>(left.count()));
    }
    ::poll(waited.data(), waited.size(), timeout);
    signalfd_siginfo info;
    if (::read(signal_fd.get(), &info, sizeof(info)) == sizeof(info)) {
      return 128 + static_cast<int>(info.ssi_signo);
    }
    if (waited[1].revents != 0) return 128 + SIGKILL;
    carrier.serve();
  }
  carrier.finish_sending();
  return *carrier.exit_code();
}

}  // namespace

int run_elastic(const LaunchOptions& options, int lifeline) {
  const auto& elastic = *options.elastic;
  if (elastic.coordinate != 0) return coordinate(options, lifeline);
  if (!elastic.coordinator.empty()) {
    return ElasticHost(options, parse_address(elastic.coordinator), nullptr, lifeline).run();
  }
  const bool several = options.nodes > 1;
  auto token = elastic.token;
  if (token.empty()) token = several ? "job" : random_token();
  if (options.node_rank > 0) {
    const CoordinatorAddress address = {options.master_addr, options.master_port, token};
    return ElasticHost(options, address, nullptr, lifeline).run();
  }
  Carrier carrier(options, token, several ? options.master_port : 0);
  // Node 0 may be unable to reach itself by the name that the others use for it.
  return ElasticHost(options, {loopback_address(), carrier.port(), token}, &carrier, lifeline)
      .run();
}

}  // namespace ddp::launch
