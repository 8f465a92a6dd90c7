#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Whether both have one layout, dtype, device and shape.
bool is_like(const at::Tensor& a, const at::Tensor& b);

/// Of a tensor what is_like() compares, for an error text.
std::string describe_kind(const at::Tensor& t);

}  // namespace ddp
