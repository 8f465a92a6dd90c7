#pragma once

#include <string>

#include <c10/util/Exception.h>

namespace examples::testing {

/// The text of the c10::ValueError that `body` throws, or nothing.
template <typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace examples::testing
