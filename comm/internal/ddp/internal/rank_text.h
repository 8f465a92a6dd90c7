// How messages name ranks.
#pragma once

#include <string>

#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// "rank 1", "ranks 1, 2".
template <typename Ranks>
std::string ranks_text(const Ranks& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined_by(", ", ranks);
}

/// "on rank 1 of 2".
inline std::string on_rank_text(const c10d::ProcessGroup& group) {
  return ddp::str("on rank ", group.getRank(), " of ", group.getSize());
}

}  // namespace ddp
