// The linear algebra of a low-rank approximation, and its random numbers.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Makes the columns of every matrix of a batch orthonormal, in place.
///
/// \param matrices  [batch, rows, columns]
/// \param epsilon   added to the length of a column before division.
void orthogonalize(const at::Tensor& matrices, double epsilon);

/// Views the gradient as a matrix of its first dimension by all others; undefined where it is none,
/// such as for a scalar.
at::Tensor as_matrix(const at::Tensor& gradient);

/// Draws seeds as NumPy's `RandomState(seed).randint(1_000_000_000)` does.
class SeedSequence {
 public:
  explicit SeedSequence(uint32_t seed) : seed_(seed), engine_(seed) {}

  uint32_t next();
  int64_t drawn() const { return drawn_; }
  /// Restores the state after this many draws.
  void restore(int64_t drawn);

 private:
  uint32_t seed_;
  std::mt19937 engine_;
  int64_t drawn_ = 0;
};

/// Fills the tensors with normal numbers, the same on every rank and device for the same seed.
void fill_normal(const std::vector<at::Tensor>& tensors, uint32_t seed);

}  // namespace ddp
