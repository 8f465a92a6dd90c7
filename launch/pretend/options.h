// The options of pretended worlds, and of lists of calls.
#pragma once

#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "launch/options.h"

namespace ddp::launch {

/// Empty: not given.
struct GivenPretended {
  std::optional<int> size, ranks_a_host;
  std::string present;
  std::string link, intra, latency;
};

void add_pretend_options(CLI::App& app, GivenPretended& given, LaunchOptions& options);

/// Whether the command line runs no ranks of a real world, whose number it would have to say.
bool needs_no_ranks(const LaunchOptions& options, const GivenPretended& given);

/// Fills in the pretended world, the folder of lists and the links.
///
/// \param ranks  of -n, which are those of a host here; empty: not given.
/// \throws CLI::ValidationError  naming option, rule and value.
void apply_pretend_options(
    const CLI::App& app, const GivenPretended& given, const std::string& ranks,
    LaunchOptions& options);

/// Bytes a second of "50GB/s", "100Gbit/s"; nothing for another text.
std::optional<double> parse_rate(const std::string& text);

/// Seconds of "5us"; nothing for another text.
std::optional<double> parse_duration(const std::string& text);

}  // namespace ddp::launch
