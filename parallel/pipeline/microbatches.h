#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A batch's tensors, cut along dimension 0 into micro-batches whose rows differ by one at most.
class Microbatches {
 public:
  /// Leaves what is not on this rank out.
  Microbatches() = default;
  /// \param name  of the argument, for errors: "inputs".
  /// \param tensors  each undefined, or with the same number of rows.
  /// \param fills  whether there may be fewer rows than micro-batches: then the last ones have rows
  ///         of the first once more, because few modules can compute without rows.
  /// \throws c10::ValueError  for other tensors.
  Microbatches(
      const char* name, const std::vector<at::Tensor>& tensors, int64_t count, bool fills,
      const std::string& on_rank);

  /// Whether a micro-batch has no rows of its own.
  bool is_filler(int64_t microbatch) const;
  std::vector<at::Tensor> tensors(int64_t microbatch) const;
  /// Its share of the batch's rows.
  double share(int64_t microbatch) const;

 private:
  std::vector<std::vector<at::Tensor>> parts_;  // by tensor
  std::vector<int64_t> rows_;                   // by micro-batch
  int64_t all_rows_ = 0;
};

/// The micro-batches' tensors one after the other; undefined where one is, or where they do not fit
/// together, because they differ in more than rows.
at::Tensor joined(const std::vector<at::Tensor>& parts);

/// Lets gradients of the micro-batches' parts flow on through the whole tensors, whose graphs
/// backward goes through once.
///
/// \param gradients  by micro-batch, then by tensor; undefined: none.
void backward_through(
    const std::vector<at::Tensor>& tensors, const std::vector<std::vector<at::Tensor>>& parts,
    const std::vector<std::vector<at::Tensor>>& gradients);

}  // namespace ddp
