#pragma once

#include <ATen/core/Tensor.h>
#include <ddp/muon.h>

namespace ddp {

/// A matrix near to `update` whose singular values are near to 1, by Newton-Schulz steps in
/// options.ns_dtype().
at::Tensor orthogonalize(const at::Tensor& update, const optim::MuonOptions& options);

/// The learning rate of a matrix of that shape.
double adjusted_rate(const optim::MuonOptions& options, int64_t rows, int64_t columns);

}  // namespace ddp
