#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "launch/options.h"

namespace ddp::launch {

/// The options that mpirun's users write, for hosts that this ddprun starts; empty: not given.
struct GivenHosts {
  std::string list;
  std::string file;
  std::string rsh;
  std::vector<std::string> variables;
  std::optional<int> all;  // ranks of the job
};

void add_host_options(CLI::App& app, GivenHosts& given, LaunchOptions& options);

/// Fills in the hosts and their ranks, and without hosts the ranks that -np gives this one. Reads
/// the hostfile.
///
/// \param ranks  of -n; 0: not given.
/// \throws CLI::ValidationError  naming option, rule and value.
void apply_host_options(
    const CLI::App& app, const GivenHosts& given, int ranks, LaunchOptions& options);

}  // namespace ddp::launch
