#pragma once

#include <cstdint>

namespace ddp {

/// How many notes carry a hash of what a rank's forward wrote to parameters beside its gradients.
constexpr int64_t kWriteNotes = 3;

/// Writes five bits of a hash for a sum over ranks: float32 holds the sums of 16,000 ranks exactly.
/// Ranks that go on writing differently are found after some passes.
///
/// \param hash  0: nothing was written.
/// \param notes  kWriteNotes elements.
inline void write_hash(uint64_t hash, float* notes) {
  const auto value = hash == 0 ? 0.F : static_cast<float>(1 + hash % 31);
  notes[0] = hash == 0 ? 0.F : 1.F;
  notes[1] = value;
  notes[2] = value * value;
}

/// Whether some ranks wrote and others did not, or wrote something else.
inline bool differ_in_hash(const float* sums, int64_t ranks) {
  const double count = sums[0], sum = sums[1], squares = sums[2];
  if (count == 0) return false;
  return count != static_cast<double>(ranks) || count * squares != sum * sum;
}

}  // namespace ddp
