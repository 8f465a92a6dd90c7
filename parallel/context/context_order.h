#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace ddp::functional {

/// The positions of a sequence in the order of the ranks that have them: of 2 W pieces, rank r has
/// r and 2 W - 1 - r.
///
/// \param length  a multiple of 2 * ranks.
at::Tensor order_of_ranks(int64_t length, int ranks);

}  // namespace ddp::functional
