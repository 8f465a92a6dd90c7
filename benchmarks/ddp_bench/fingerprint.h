#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp_bench {

/// What is left of a mode's parameters to compare and to print.
struct Fingerprint {
  uint64_t hash = 0;    // of every bit
  double checksum = 0;  // the sum of the magnitudes, in double
};

Fingerprint fingerprint(const std::vector<at::Tensor>& parameters);

/// How far two trainings from the same `start` ended apart, by the parameter for which that is
/// worst: |a - b| over the longer of the ways |a - start| and |b - start|. 0: equal; about 1: as
/// far as they went at all. Rounding in another order stays below 0.01.
double distance(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
    const std::vector<at::Tensor>& start);

/// How a mode that communicates ended.
struct Ending {
  std::string mode;
  Fingerprint fingerprint;
  double distance = 0;  // from the first one
};

/// How alike the modes' parameters have to be in the end.
enum class Agreement {
  Bitwise,
  Rounded,  // but for sums in another order
  OnGpu,    // whose kernels add in any order: each mode diverges from itself, too, by and by
};

/// Says which mode ended with other parameters than the first one; "" when none did.
std::string disagreement(const std::vector<Ending>& endings, Agreement agreement);

/// Says which rank ended with other parameters than rank 0, in which mode; "" when none did.
///
/// \param hashes  by rank, of that rank's parameters in each of the modes.
std::string disagreement_of_ranks(
    const std::vector<std::string>& modes, const std::vector<std::vector<uint64_t>>& hashes);

}  // namespace ddp_bench
