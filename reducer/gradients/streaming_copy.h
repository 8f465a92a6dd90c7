#pragma once

#include <cstddef>

namespace ddp {

/// memcpy with stores that bypass the caches, where the processor has them. For large blocks: most
/// of such a block would be evicted before it is read, and an ordinary store would first read the
/// cache line that it overwrites.
void streaming_copy(void* to, const void* from, size_t bytes);

}  // namespace ddp
