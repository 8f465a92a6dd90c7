// Shared memory among ranks that are told on which host they are.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/backends.h"

namespace ddp::testing {

/// \param hosts  a letter for each rank: who has the same is on the same host.
inline backends::Shared share_on_hosts(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& hosts,
    std::chrono::milliseconds timeout, std::chrono::milliseconds connect_within) {
  const auto in = [&](const char* prefix) {
    return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
  };
  const auto size = static_cast<int>(hosts.size());
  backends::Setup setup{
      in("hosts"),
      rank,
      size,
      timeout,
      Deadline(connect_within),
      "test",
      {},
      hosts.substr(static_cast<size_t>(rank), 1)};
  for (int other = 0; other < size; ++other) setup.global_ranks.push_back(other);
  const auto connect = [](const backends::Setup& of) {
    return backends::make_gloo(of, {{}, "127.0.0.1"});
  };
  auto gloo_setup = setup;
  gloo_setup.store = in("hosts/gloo");
  return backends::make_shm(setup, connect(gloo_setup), connect);
}

}  // namespace ddp::testing
