// Checks of the values on ddprun's command line. Their errors name the rule and the value; CLI11
// adds the option.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace ddp::launch {

/// Accepts decimal integers in [low, high] only: no signs, no fractions, no overflow.
CLI::Validator whole_number(int low, int high);

/// A number of ranks, one for each host ("4,2"), or a word for what this host has.
CLI::Validator rank_counts();

/// "2", or for an elastic job "2:4".
CLI::Validator host_counts();

/// From 0 to a day.
CLI::Validator seconds();

/// \param thing  "a host".
CLI::Validator not_empty(const std::string& thing);

/// HOST:PORT, where port 0 is one that the reader may refuse.
CLI::Validator endpoint();

/// A value that is part of a line, so without spaces.
CLI::Validator word();

/// HOST:PORT/TOKEN.
CLI::Validator coordinator();

}  // namespace ddp::launch
