// Connects ranks over shared memory as if they were on several hosts.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/shm/backend/bootstrap.h"

namespace ddp::testing {

/// \param hosts  a letter for each rank: ranks with the same letter are on the same host.
/// \param arena_bytes  of each rank; 0: the default.
inline backends::shm::BootstrapResult share_on_hosts(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& hosts,
    std::chrono::milliseconds timeout, std::chrono::milliseconds connect_within,
    size_t arena_bytes = 0) {
  const auto in = [&](const char* prefix) {
    return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  };
  backends::Setup setup;
  setup.store = in("hosts");
  setup.rank = rank;
  setup.world_size = static_cast<int>(hosts.size());
  setup.timeout = timeout;
  setup.connect_by = Deadline(connect_within);
  setup.group_name = "test";
  for (int other = 0; other < setup.world_size; ++other) setup.global_ranks.push_back(other);
  setup.gloo_devices = {{}, "127.0.0.1"};
  auto gloo_setup = setup;
  gloo_setup.store = in("hosts/gloo");
  const auto host = hosts.substr(static_cast<size_t>(rank), 1);
  return backends::shm::bootstrap(setup, backends::make_gloo(gloo_setup), {host, arena_bytes});
}

}  // namespace ddp::testing
