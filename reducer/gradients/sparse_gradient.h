#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A sparse gradient that is ready to be sent.
struct PackedSparse {
  at::Tensor gradient;     // a copy that a collective may write to
  std::string difference;  // kind_difference() of a gradient that is not sparse; else ""
};

/// The gradient of `parameter` times `scale`; no rows where it has none or a dense one.
PackedSparse pack_sparse(const at::Tensor& parameter, double scale);

/// A sparse gradient of an embedding, with one index for each row, and no rows.
at::Tensor sparse_without_rows(const at::Tensor& parameter);

/// Makes `.grad` of `parameter` the reduced gradient.
void unpack_sparse(const at::Tensor& parameter, const at::Tensor& reduced);

}  // namespace ddp
