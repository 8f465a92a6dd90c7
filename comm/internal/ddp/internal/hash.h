// Hashes that ranks compare, so they must be the same in every build: std::hash differs between
// standard libraries and their versions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ddp {

/// FNV-1a, for short texts: about a nanosecond per byte.
inline uint64_t fnv1a(std::string_view text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return hash;
}

/// SplitMix64: numbers next to each other, as seeds and ranks are, have nothing in common after it.
inline uint64_t mix_bits(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// Extends a hash by a word. Combines both halves of the product: otherwise changes of the highest
/// bits stay among the highest of the lower half, where two numbers that change their signs could
/// cancel each other out.
inline uint64_t mixed(uint64_t hash, uint64_t word) {
  __extension__ using Product = unsigned __int128;
  const auto product = static_cast<Product>(hash ^ word) * 0x9E3779B97F4A7C15ULL;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

/// Hashes a tensor's bytes. Uses four lanes, whose multiplications do not depend on each other.
inline uint64_t hash_of_bytes(const void* data, size_t size) {
  constexpr size_t kLanes = 4;
  using Block = std::array<uint64_t, kLanes>;
  Block lanes{1, 2, 3, 4};
  const auto take = [&](const std::byte* bytes, size_t count) {
    Block block{};
    std::memcpy(block.data(), bytes, count);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], block[i]);
  };
  const auto* bytes = static_cast<const std::byte*>(data);
  const auto* last = bytes + size - size % sizeof(Block);
  for (; bytes != last; bytes += sizeof(Block)) take(bytes, sizeof(Block));
  if (size % sizeof(Block) > 0) take(bytes, size % sizeof(Block));
  uint64_t hash = size;
  for (const auto lane : lanes) hash = mixed(hash, lane);
  return hash;
}

}  // namespace ddp
