// How the ranks of a bootstrap tell each other what they need to know: through their store.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "../../setup.h"

namespace ddp::backends::shm {

/// What the ranks shared in one round.
struct Round {
  std::string name;
  std::vector<std::string> entries;  // by rank
  std::string problem;               // of the first rank that has one, with its number; else empty
};

/// Shares what `make_entry` returns, or what it throws, with all ranks.
///
/// \return  the same on all ranks.
/// \throws c10::Error  when a rank's entry is not there by the deadline, or is malformed.
///
/// Collective: yes. Blocks: host, until the deadline.
/// Cost: a set, a wait and a multiGet; world_size gets where the store has no multiGet.
Round share(
    const Setup& setup, const std::string& name, c10::function_ref<std::string()> make_entry);

/// \throws c10::Error  naming the rank and the entry.
[[noreturn]] void throw_malformed(const Round& round, size_t rank, const char* expected);

}  // namespace ddp::backends::shm
