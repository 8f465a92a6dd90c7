#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// How many processes both groups have. Nothing if that is not known: they are two groups, and not
/// of one job of this library.
std::optional<int64_t> count_common_ranks(const c10d::ProcessGroup& a, const c10d::ProcessGroup& b);

}  // namespace ddp
