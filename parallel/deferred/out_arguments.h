// Arguments like `out=` of Python, that an operation writes its results into.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <c10/core/Storage.h>

namespace ddp {

struct OutArgument {
  size_t result = 0, argument = 0;  // their numbers in the schema
};

/// The out arguments that are single tensors.
std::vector<OutArgument> out_arguments(const c10::FunctionSchema& schema);

/// Gives a deferred tensor, whose storage has this stand-in, the sizes and strides of `like`.
void resize_deferred(const at::Tensor& tensor, const at::Tensor& like, const c10::Storage& standin);

}  // namespace ddp
