// For the programs that have options; header only, so that benchmarks can use it without the
// examples.
#pragma once

#include <ostream>
#include <string>

#include <CLI/CLI.hpp>

#include "usage_error.h"

namespace examples {

/// Reads the command line into what `app` was told.
///
/// \param help  gets the text that --help asks for.
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
