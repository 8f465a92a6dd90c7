#pragma once

#include <exception>
#include <string>

#include <ddp/internal/check.h>

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
  try {
    DDP_CHECK_WITH(DistBackendError, false, text);
  } catch (...) {
    return std::current_exception();
  }
}

/// The text of the exception that `body` throws; "" if it throws none. For errors that must
/// reach all ranks before any rank throws.
template <typename Body>
std::string problem_of(Body&& body) {
  try {
    body();
  } catch (...) {
    return text_of(std::current_exception());
  }
  return "";
}

}  // namespace ddp
