#pragma once

#include <stdexcept>

namespace examples {

/// A command line that cannot be; `what()` is one line.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace examples
