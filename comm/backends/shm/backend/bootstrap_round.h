// The rounds in which the ranks of a bootstrap exchange information through their store.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

#include "../../setup.h"

namespace ddp::backends::shm {

/// The entries of all ranks in one round.
struct Round {
  std::string name;
  std::vector<std::string> entries;  // by rank
  std::string problem;               // the first rank's that has one, with its number; else empty
};

/// Sends the return value of `make_entry`, or the text of its exception, to all ranks.
///
/// \return  the same on all ranks.
/// \throws c10::Error  if a rank's entry is not there by the deadline, or is malformed.
///
/// Collective: yes. Blocks: host, until the deadline.
/// Cost: a set, a wait and a multiGet; world_size gets if the store has no multiGet.
Round share(
    const Setup& setup, const std::string& name, c10::function_ref<std::string()> make_entry);

/// \throws c10::Error  naming the rank and the entry.
[[noreturn]] void throw_malformed(const Round& round, size_t rank, const char* expected);

}  // namespace ddp::backends::shm
