#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ddp/diloco.h>

namespace ddp {

/// Elements that have a scale in common, with Wire::Int8.
constexpr int64_t kWireBlock = 256;

/// Bytes of `elements` numbers on the wire.
int64_t encoded_bytes(Wire wire, int64_t elements);

/// \param values  1-D, float32, on the CPU.
/// \return encoded_bytes() bytes, 1-D. The same on every rank and in every build for equal values.
at::Tensor encode(Wire wire, const at::Tensor& values);

/// Decodes `elements` values that encode() made. A value that was not finite is not finite here.
at::Tensor decode(Wire wire, const at::Tensor& bytes, int64_t elements);

}  // namespace ddp
