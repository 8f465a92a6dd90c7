// Catches the errors of a piece of code, for tests whose subject is the text.
#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include <ddp/internal/check.h>

namespace ddp::testing {

/// Returns the text, without a backtrace, of the `Error` that `body` throws; "" for none. Other
/// exceptions pass through.
template <typename Error = std::exception, typename Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return text_of(error);
  }
  return "";
}

/// The text of the error that `body` threw, "" for none, and how long it took.
struct TimedError {
  std::string error;
  double seconds = 0;
};
template <typename Error = std::exception, typename Body>
TimedError timed_error_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  auto error = error_of<Error>(body);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {std::move(error), took.count()};
}

}  // namespace ddp::testing
