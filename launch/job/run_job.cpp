#include "launch/job/run_job.h"

#include <csignal>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/system/host.h>

#include "launch/job/coordinator.h"
#include "launch/job/host_loop.h"
#include "launch/poll_until.h"
#include "launch/processes/signals.h"

namespace ddp::launch {
namespace {

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

}  // namespace

int run_job(const LaunchOptions& options, int lifeline) {
  const auto elastic = options.elastic.value_or(ElasticOptions());
  if (elastic.coordinate != 0) return coordinate(options, lifeline);
  if (!elastic.coordinator.empty()) {
    const auto address = membership::parse_address(elastic.coordinator);
    return HostLoop(options, address, nullptr, lifeline).run();
  }
  const bool several = hosts_that_agree(options) > 1;
  auto token = elastic.token;
  if (token.empty()) token = several ? "job" : random_token();
  if (several && options.node_rank > 0) {
    return HostLoop(options, {options.master_addr, options.master_port, token}, nullptr, lifeline)
        .run();
  }
  std::optional<int> port;  // none: this host's ddprun is the only client
  if (several) port = options.master_port;
  if (options.elastic && !several) port = 0;
  Coordinator coordinator(options, token, port);
  return HostLoop(options, {loopback_address(), coordinator.port(), token}, &coordinator, lifeline)
      .run();
}

}  // namespace ddp::launch
