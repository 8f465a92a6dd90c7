#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "launch/options.h"
#include "launch/pet_variables.h"

namespace ddp::launch {

/// The options that only torchrun's users write; empty: not given.
struct TorchrunOptions {
  bool no_python = false;
  std::string backend;
  std::string id;
  std::string conf;
  std::string tee;
  std::string redirects;
  std::vector<std::string> unused;  // those that have no meaning here, whatever their values
};

/// Rewrites the options before the program as ddprun spells them: --node_rank becomes --node-rank,
/// and mpirun's -np, -host, -hostfile and -machinefile get their second hyphen. The program and its
/// arguments stay as they are.
///
/// \param app  with all options.
/// \throws CLI::ValidationError  where nothing is after an option's '='.
std::vector<std::string> with_own_spellings(const CLI::App& app, int argc, const char* const* argv);

void add_torchrun_options(CLI::App& app, TorchrunOptions& torchrun);

/// Fills in what they say of the job, and for what they do not say what the engine does; call once
/// the job's hosts and endpoint are known.
///
/// \param variables  the environment; empty: none.
/// \return a line for each option that has no meaning here.
/// \throws CLI::ValidationError  naming option, rule and value.
std::vector<std::string> apply_torchrun_options(
    const CLI::App& app, const TorchrunOptions& torchrun, const Variables& variables,
    LaunchOptions& options);

/// Reads -n: "4", "4,2" for two hosts, "auto", "cpu" or "gpu" for this host.
///
/// \param text  that rank_counts() accepts.
/// \throws CLI::ValidationError  when there is no GPU, or another number of hosts.
void set_ranks(const std::string& text, LaunchOptions& options);

/// Reads --nnodes.
///
/// \param text  that host_counts() accepts.
/// \return MIN of MIN:MAX; `options` gets MAX.
std::optional<int> set_nodes(const std::string& text, LaunchOptions& options);

}  // namespace ddp::launch
