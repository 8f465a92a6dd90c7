#pragma once

#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/internal/text.h>
#include <torch/csrc/utils/cpp_stacktraces.h>

namespace ddp {

/// Makes an error for users to read, whose text has no stack trace appended; as in Python,
/// TORCH_SHOW_CPP_STACKTRACES=1 in the environment adds one.
template <typename Error>
Error readable_error(const c10::SourceLocation& where, std::string text) {
  return torch::get_cpp_stacktraces_enabled() ? Error(where, std::move(text))
                                              : Error(std::move(text), nullptr);
}

}  // namespace ddp

#define DDP_HERE \
  ::c10::SourceLocation { __func__, __FILE__, static_cast<uint32_t>(__LINE__) }

/// TORCH_CHECK and its variants, without the stack trace.
#define DDP_CHECK_WITH(error, condition, ...)                                     \
  if (C10_UNLIKELY(!(condition))) {                                               \
    throw ::ddp::readable_error<::c10::error>(DDP_HERE, ::ddp::str(__VA_ARGS__)); \
  }
#define DDP_CHECK(condition, ...) DDP_CHECK_WITH(Error, condition, __VA_ARGS__)
#define DDP_CHECK_VALUE(condition, ...) DDP_CHECK_WITH(ValueError, condition, __VA_ARGS__)
