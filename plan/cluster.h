#pragma once

#include <cstdint>

namespace ddp::plan {

/// A message of n bytes takes latency + n / rate.
struct Link {
  double latency = 0;  // seconds
  double rate = 1;     // bytes a second
};

/// The ranks, as many on each host, and what they have.
struct Cluster {
  int64_t ranks = 1;
  int64_t hosts = 1;
  double memory = 0;      // bytes a rank
  double operations = 1;  // floating-point operations a second of a rank that has a core, or a GPU
  double cores = 0;       // a host's; 0: as many as ranks. Ranks share fewer, and compute by turns.
  double overlap = 1;     // the part of a collective that slows no computation down meanwhile
  Link host;              // between two ranks of a host
  Link network;           // between two hosts: all that their ranks send each other goes there

  int64_t ranks_a_host() const { return ranks / hosts; }
  /// How many times as long computing takes while all ranks compute.
  double crowding() const {
    const auto each = static_cast<double>(ranks_a_host());
    return cores > 0 && cores < each ? each / cores : 1;
  }
};

}  // namespace ddp::plan
