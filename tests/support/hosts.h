// Connects ranks over shared memory as if they were on several hosts.
#pragma once

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/gloo/gloo.h"
#include "comm/backends/shm/backend/bootstrap.h"

namespace ddp::testing {

inline backends::Setup setup_on_hosts(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix, int rank,
    const std::vector<int>& ranks, std::chrono::milliseconds timeout) {
  backends::Setup setup;
  setup.store = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  setup.rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  setup.world_size = static_cast<int>(ranks.size());
  setup.timeout = timeout;
  setup.connect_by = Deadline(timeout);
  setup.group_name = "test";
  setup.global_ranks.assign(ranks.begin(), ranks.end());
  setup.gloo_devices = {{}, "127.0.0.1"};
  return setup;
}

/// \param hosts  a letter for each rank: ranks with the same letter are on the same host.
/// \param arena_bytes  of each rank; 0: the default.
inline backends::shm::BootstrapResult share_on_hosts(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& hosts,
    std::chrono::milliseconds timeout, std::chrono::milliseconds connect_within,
    size_t arena_bytes = 0) {
  std::vector<int> all(hosts.size());
  std::iota(all.begin(), all.end(), 0);
  auto setup = setup_on_hosts(store, "hosts", rank, all, timeout);
  setup.connect_by = Deadline(connect_within);
  const auto host = hosts.substr(static_cast<size_t>(rank), 1);
  return backends::shm::bootstrap(setup, {host, arena_bytes});
}

/// Makes a group of some ranks of share_on_hosts(), on one of them.
///
/// \param rank, ranks  of the parent.
inline backends::shm::BootstrapResult share_within(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int>& ranks,
    const backends::BackendPtr& parent, std::chrono::milliseconds timeout) {
  auto setup = setup_on_hosts(store, "within", rank, ranks, timeout);
  setup.parent = parent;
  return backends::shm::bootstrap(setup, {});
}

}  // namespace ddp::testing
