// The subcommands of the program `costs`, one a source.
#pragma once

#include <CLI/CLI.hpp>

namespace costs {

/// Adds a subcommand with its options; parsing it runs the benchmark, which prints its results.
void add_all_reduce(CLI::App& app);
void add_groups(CLI::App& app);
void add_init_time(CLI::App& app);
void add_inputs(CLI::App& app);
void add_parameters(CLI::App& app);
void add_reducer(CLI::App& app);
void add_vote(CLI::App& app);
void add_worlds(CLI::App& app);

}  // namespace costs
