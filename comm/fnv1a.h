#pragma once

#include <cstdint>
#include <string>

namespace ddp {

/// The FNV-1a hash: unlike std::hash, every rank gets the same value, also from another standard
/// library.
inline uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 14695981039346656037ULL;
  for (const unsigned char byte : text) hash = (hash ^ byte) * 1099511628211ULL;
  return hash;
}

}  // namespace ddp
