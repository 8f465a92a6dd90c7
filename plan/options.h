#pragma once

#include <cstddef>
#include <optional>
#include <ostream>

#include "plan/planner.h"

namespace ddp::plan {

struct Options {
  Task task;
  size_t top = 20;
  bool json = false;
};

/// Without options, the program ends with the code: help was asked for, or the command line is bad.
struct ParsedOptions {
  std::optional<Options> options;
  int exit_code = 0;
};

/// Reads the command line. Texts that it asks for go to `out`, errors to `err`, in one line.
ParsedOptions parse_options(
    int argc, const char* const* argv, std::ostream& out, std::ostream& err);

}  // namespace ddp::plan
