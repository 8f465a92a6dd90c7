#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace ddp {

/// What the error says, without the stack that c10::Error::what() adds.
inline std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace ddp
