#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp_bench {

/// Digests of a mode's final parameters, to compare and to print.
struct Fingerprint {
  uint64_t hash = 0;    // of every bit
  double checksum = 0;  // the sum of the magnitudes, in double
};

Fingerprint fingerprint(const std::vector<at::Tensor>& parameters);

/// The distance between the ends of two trainings from the same `start`, for the parameter where it
/// is largest: |a - b| over the larger of |a - start| and |b - start|. 0: equal; about 1: as far
/// apart as training moved them at all. Rounding in another order stays below 0.01.
double distance(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
    const std::vector<at::Tensor>& start);

/// The final parameters of a mode that communicates.
struct Ending {
  std::string mode;
  Fingerprint fingerprint;
  double distance = 0;  // from the first one
};

/// The agreement that the modes' final parameters must have.
enum class Agreement {
  Bitwise,
  Rounded,  // up to the rounding of sums in another order
  OnGpu,    // kernels add in any order: two runs of one mode slowly diverge, too
};

/// Names the mode that ended with other parameters than the first one; "" when none did.
std::string disagreement(const std::vector<Ending>& endings, Agreement agreement);

/// Names the rank that ended with other parameters than rank 0, and the mode; "" when none did.
///
/// \param hashes  by rank, of that rank's parameters in each of the modes.
std::string disagreement_of_ranks(
    const std::vector<std::string>& modes, const std::vector<std::vector<uint64_t>>& hashes);

}  // namespace ddp_bench
