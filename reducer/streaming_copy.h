#pragma once

#include <cstddef>

namespace ddp {

/// memcpy, but what is written goes past the caches where the processor can do that: for blocks of
/// which little would be left there when they are read, and which need not be read to be
/// overwritten.
void streaming_copy(void* to, const void* from, size_t bytes);

}  // namespace ddp
