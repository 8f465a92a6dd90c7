// Which messages of a pipeline may share a stream of a device.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "pipeline/schedule.h"

namespace ddp {

/// A kind of messages that all ranks send and receive in one order.
struct MessageRoute {
  char kind = 'F';      ///< Activations ('F') or gradients ('B').
  bool goes_up = true;  ///< To a higher rank: not from the last rank to the first with activations.

  bool operator<(const MessageRoute& other) const {
    return std::tie(kind, goes_up) < std::tie(other.kind, other.goes_up);
  }
};

inline MessageRoute route_of(char kind, int64_t sender, int64_t receiver) {
  return {kind, sender < receiver};
}

/// The routes that need a stream each, where a rank's stream moves one message at a time, in the
/// order of the calls, and a send ends with its receive. Two ranks whose streams begin with sends
/// to each other, an activation and a gradient, would wait for ever.
///
/// \return  empty if one stream can carry all.
std::vector<MessageRoute> separate_routes(PipelineSchedule, const PipelineShape&);

}  // namespace ddp
