#include "files/crc32c.h"

#include <array>
#include <cstring>

namespace ddp {
namespace {

constexpr uint32_t kReflectedPolynomial = 0x82F63B78;

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kReflectedPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

uint32_t crc_by_table(uint32_t crc, const unsigned char* bytes, size_t size) {
  static constexpr auto kTable = make_crc_table();
  for (size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ kTable[(crc ^ bytes[i]) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
// Ten times as fast: checksums are computed during training steps, on the same cores.
__attribute__((target("sse4.2"))) uint32_t crc_by_instruction(
    uint32_t crc, const unsigned char* bytes, size_t size) {
  uint64_t wide = crc;
  for (; size >= sizeof wide; size -= sizeof wide, bytes += sizeof wide) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  return crc_by_table(static_cast<uint32_t>(wide), bytes, size);
}
#endif

}  // namespace

uint32_t crc32c(uint32_t before, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~crc_by_instruction(~before, bytes, size);
#endif
  return ~crc_by_table(~before, bytes, size);
}

}  // namespace ddp
