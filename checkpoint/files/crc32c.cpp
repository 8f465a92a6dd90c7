#include <ddp/internal/crc32c.h>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

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
#define DDP_CRC_TARGET "sse4.2"
#define DDP_CRC_OF_WORD __builtin_ia32_crc32di
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
#define DDP_CRC_TARGET "+crc"
#define DDP_CRC_OF_WORD __builtin_aarch64_crc32cx
bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#ifdef DDP_CRC_TARGET
// Ten times as fast: checksums are computed during training steps, on the same cores.
__attribute__((target(DDP_CRC_TARGET))) uint32_t crc_by_instruction(
    uint32_t crc, const unsigned char* bytes, size_t size) {
  uint64_t wide = crc;
  for (; size >= sizeof(uint64_t); size -= sizeof(uint64_t), bytes += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    wide = DDP_CRC_OF_WORD(wide, word);
  }
  return crc_by_table(static_cast<uint32_t>(wide), bytes, size);
}
#endif

}  // namespace

uint32_t crc32c(uint32_t before, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
#ifdef DDP_CRC_TARGET
  static const bool by_instruction = has_instruction();
  if (by_instruction) return ~crc_by_instruction(~before, bytes, size);
#endif
  return ~crc_by_table(~before, bytes, size);
}

}  // namespace ddp
