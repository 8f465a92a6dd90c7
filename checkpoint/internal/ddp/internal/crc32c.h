#pragma once

#include <cstddef>
#include <cstdint>

namespace ddp {

/// The CRC-32C (Castagnoli, reflected, as in iSCSI and ext4) of bytes that come in pieces: start
/// with 0 and pass the result of the piece before.
///
/// Finds every error of up to 32 bits in a row, and every single flipped bit.
uint32_t crc32c(uint32_t before, const void* data, size_t size);

}  // namespace ddp
