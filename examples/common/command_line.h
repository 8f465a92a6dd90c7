// For programs that have options; header only, so that benchmarks can use it without the examples.
#pragma once

#include <cmath>
#include <ostream>
#include <string>

#include <CLI/CLI.hpp>

#include "usage_error.h"

namespace examples {

/// CLI11's own check for positive numbers accepts nan and inf.
inline const CLI::Validator kPositiveFinite(
    [](const std::string& text) {
      double value = 0;
      const bool good = CLI::detail::lexical_cast(text, value) && std::isfinite(value) && value > 0;
      return good ? std::string() : "expected a number greater than 0, got " + text;
    },
    /*validator_desc=*/"");

/// As CLI11's Range, without its text in the help.
template <typename T>
CLI::Validator between(T low, T high) {
  return CLI::Range(low, high).description("");
}

/// Reads the command line into the variables of `app`'s options.
///
/// \param help  receives the text of --help.
/// \return false when --help was given.
/// \throws UsageError
inline bool parse_command_line(
    CLI::App& app, int argc, const char* const* argv, std::ostream& help) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    help << app.help();
    return false;
  } catch (const CLI::ParseError& error) {
    throw UsageError(
        std::string(error.what()) + " (" + app.get_name() + " --help lists the options)");
  }
  return true;
}

}  // namespace examples
