// Numbers that are summed over ranks beside a unit's gradients: the notes of whose gradients they
// are, and of how a program scaled those before.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// How many notes carry a unit's number beside its gradients.
constexpr int64_t kNumberNotes = 32;

/// Writes the last 16 binary digits of a number, each as two notes: "it is 0" and "it is 1". In a
/// sum over ranks both differ from 0 where ranks gave different digits, in every dtype.
///
/// \param notes  kNumberNotes elements.
void write_number(int64_t number, float* notes);

/// Reads from the sums of the notes what the other ranks wrote.
///
/// \param number  what this rank wrote.
/// \param others  how many other ranks there are.
///
/// \return  nothing where all wrote this number; else the number of the others, or 0 where they
///         wrote several, or the dtype does not have the sum.
std::optional<int64_t> read_number(const float* sums, int64_t number, int64_t others);

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

/// How many notes carry a rank's factor beside its gradients.
constexpr int64_t kFactorNotes = 3;

/// Writes a factor for a sum over ranks.
///
/// \param notes  kFactorNotes elements.
void write_factor(double factor, float* notes);

/// Whether the ranks that wrote a factor wrote different ones.
///
/// \param sums  of float32 or float64: sums of 16 bits do not have the digits.
bool differ_in_factor(const float* sums);

}  // namespace ddp
