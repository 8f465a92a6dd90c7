// Notes that ranks compare beside the sum of a unit's gradients: which parameters got one, and how
// a program scaled those before.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The largest and the least of the numbers that ranks wrote.
struct Spread {
  float most;
  float least;
};

/// How many words carry a number: an element-wise maximum over ranks turns them into its spread.
constexpr int64_t kSpreadWords = 2;

/// \param number  of at most 24 bits, where ranks compare it for equality. Nothing: this rank has
///        none.
void write_spread(std::optional<float> number, float* words);

/// \return  nothing where no rank wrote a number.
std::optional<Spread> read_spread(const float* words);

/// This rank's notes of one reduction of a unit.
struct UnitNotes {
  std::vector<bool> has_gradient;  ///< by parameter
  double factor = 0;               ///< of ScaledGradients
  uint64_t writes = 0;  ///< a hash of what forward wrote since the last reduction; 0: nothing
};

/// Finds that a program scaled this rank's gradients between two passes, as LibTorch's
/// clip_grad_norm_() does: by another factor on each rank, since it knows this rank's shards alone.
///
/// Cost: the memory of some small gradients until the next pass. Not on a device, whose values the
/// host would wait for.
class ScaledGradients {
 public:
  /// After a pass.
  void clear() { samples_.clear(); }
  /// Whether sample() takes a gradient: it is small, and on the CPU.
  bool takes(const at::Tensor& gradient) const;
  /// A gradient as the pass left it. Others, and those whose memory is a part of a larger one, are
  /// left out.
  void sample(const at::Tensor& gradient);
  /// The factor, above 0 and at most 1; 0 where the program did something else, or nothing is
  /// known.
  double factor() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> samples_;  // and its values
};

/// Whether the ranks that knew a factor knew different ones.
bool differ_in_factor(const Spread& factors);

}  // namespace ddp
