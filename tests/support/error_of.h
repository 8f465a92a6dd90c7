// What a piece of code throws, for tests whose subject is the text.
#pragma once

#include <exception>
#include <string>

#include <ddp/error_text.h>

namespace ddp::testing {

/// The text, without a backtrace, of the `Error` that `body` throws; "" for nothing. Others pass.
template <typename Error = std::exception, typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return text_of(error);
  }
  return "";
}

}  // namespace ddp::testing
