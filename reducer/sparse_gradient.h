#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp {

/// A sparse gradient on its way to the ranks' sum.
struct PackedSparse {
  at::Tensor gradient;     // a copy that a collective may write to
  std::string difference;  // of the parameter's gradient, which is not in it; "" when it is
};

/// The gradient of `parameter` times `scale`; no rows where it has none or a dense one.
PackedSparse pack_sparse(const at::Tensor& parameter, double scale);

/// A gradient as an embedding makes it, rows with an index each, of no rows.
at::Tensor no_rows(const at::Tensor& parameter);

/// Makes `.grad` of `parameter` the reduced gradient.
void unpack_sparse(const at::Tensor& parameter, const at::Tensor& reduced);

}  // namespace ddp
