// How long a collective or a message takes, by the usual model of latency and rate.
#pragma once

#include <cstdint>
#include <string>

#include "launch/pretend/settings.h"

namespace ddp::launch {

/// How long messages take on a way: `latency` and bytes / `rate` each.
struct Way {
  double latency = 0;  // seconds
  double rate = 1;     // bytes a second
};

/// The way between ranks of one host, or of several.
Way way_of(const Links&, bool is_one_host);

/// Messages that follow each other, each after the one before, in a ring of `size` ranks: 2 (n - 1)
/// of an all_reduce, n - 1 of what has half of it, 1 of a message.
int64_t rounds_of(const std::string& kind, int64_t size);

/// Seconds of a call in a group of `size` ranks that has the way to itself.
///
/// A ring: each rank sends to its neighbor in every round (R. Thakur, R. Rabenseifner, W. Gropp,
/// "Optimization of Collective Communication Operations in MPICH", 2005; its alpha is the latency,
/// its beta 1 / rate; what it has of computing on the way is left out).
///
/// \param bytes  of a rank's input; of an all_gather what it contributes.
double seconds_of(const std::string& kind, int64_t size, int64_t bytes, const Way&);

}  // namespace ddp::launch
