#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Whether both have one layout, dtype, device and shape.
bool is_like(const at::Tensor& a, const at::Tensor& b);

/// How `got` differs in what is_like() compares: "Double instead of Float"; "" where it does not.
std::string kind_difference(const at::Tensor& got, const at::Tensor& expected);

}  // namespace ddp
