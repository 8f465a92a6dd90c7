#pragma once

#include <stdexcept>

namespace examples {

/// Thrown for an invalid command line; `what()` is one line.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace examples
