#pragma once

#include <cstdint>
#include <memory>

#include "models.h"

namespace ddp_bench {

constexpr int64_t kTransformerVocabulary = 1000;
constexpr int64_t kTransformerLength = 64;  // tokens in a sequence

/// Predicts a token for each of a sequence: [N, 64] numbers below 1000 to [N * 64, 1000]. Six
/// layers of width 256 with 8 heads, normalized before each part; 5.3 million parameters, 21 MB.
std::shared_ptr<Net> make_transformer();

}  // namespace ddp_bench
