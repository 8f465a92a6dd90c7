// How errors for users are thrown, and their texts.
#pragma once

#include <exception>
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

namespace ddp {

/// The error's text, without the stack trace that c10::Error::what() adds.
inline std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

inline std::string text_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& error) {
    return text_of(error);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

/// A DistBackendError with that text, for another thread to throw.
inline std::exception_ptr backend_error(const std::string& text) {
  return std::make_exception_ptr(readable_error<c10::DistBackendError>(DDP_HERE, text));
}

/// The exception that `body` throws; null if it throws none.
template <typename Body>
std::exception_ptr exception_of(Body&& body) {
  try {
    body();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// The text of the exception that `body` throws; "" if it throws none. For errors that must
/// reach all ranks before any rank throws.
template <typename Body>
std::string problem_of(Body&& body) {
  const auto exception = exception_of(body);
  return exception ? text_of(exception) : "";
}

}  // namespace ddp
