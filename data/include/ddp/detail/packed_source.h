#pragma once

/// Makes the source of packed(), see stream_sources.h. Not a public header: its names may change at
/// any time.

#include <cstdint>
#include <optional>
#include <vector>

#include <ddp/detail/stream_source.h>
#include <ddp/export.h>

namespace ddp::detail {

/// The tokens of a document, a sample of the inner source.
using TokensOf = std::vector<int64_t> (*)(const void* document);

/// \throws c10::ValueError  length < 1.
DDP_API StreamSourcePtr packed_source(
    StreamSourcePtr documents, TokensOf tokens_of, int64_t length, std::optional<int64_t> end);

}  // namespace ddp::detail
