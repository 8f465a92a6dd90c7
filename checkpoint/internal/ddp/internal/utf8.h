// Without LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ddp {

/// Whether bytes are UTF-8, as JSON has to be.
inline bool is_utf8(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    const size_t more = lead < 0x80 ? 0 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    if ((lead >= 0x80 && lead < 0xC2) || lead > 0xF4 || bytes.size() - i <= more) return false;
    uint32_t code = more == 0 ? lead : lead & (0x3FU >> more);
    for (size_t k = 1; k <= more; ++k) {
      const auto tail = static_cast<unsigned char>(bytes[i + k]);
      if ((tail & 0xC0U) != 0x80U) return false;
      code = (code << 6U) | (tail & 0x3FU);
    }
    const bool is_too_long = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
    if (is_too_long || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    i += more + 1;
  }
  return true;
}

}  // namespace ddp
