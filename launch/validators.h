// Checks of the values on ddprun's command line. Their errors name the rule and the value; CLI11
// adds the option.
#pragma once

#include <optional>
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

/// A name or an address, which has colons only where it is one of IPv6, with or without brackets.
CLI::Validator host();

/// HOST:PORT or HOST. The reader may refuse port 0, or an endpoint without one.
CLI::Validator endpoint();

struct Endpoint {
  std::string host;  // without brackets
  std::optional<int> port;
};

/// \return nothing where endpoint() refuses the text.
std::optional<Endpoint> endpoint_of(const std::string& text);

/// A value that is part of a line, so without spaces.
CLI::Validator word();

/// HOST:PORT/TOKEN.
CLI::Validator coordinator();

}  // namespace ddp::launch
