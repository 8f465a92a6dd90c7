#pragma once

#include <string>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>

namespace ddp {

/// Adds what a sharded model did to an error of a collective, for its text knows neither units nor
/// passes; and what to do, where ranks did different things.
///
/// \param doing  "FullyShardedDataParallel was gathering layers.0".
void add_context(c10::DistBackendError& error, const std::string& doing, const ProcessGroup& group);

/// Runs `body`, to whose errors it adds what `doing` returns.
template <typename Doing, typename Body>
void with_context(const Doing& doing, const ProcessGroup& group, const Body& body) {
  try {
    body();
  } catch (c10::DistBackendError& error) {
    add_context(error, doing(), group);
    throw;
  }
}

}  // namespace ddp
