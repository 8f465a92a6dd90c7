// The subcommands of the program `micro`, one a source.
#pragma once

#include <CLI/CLI.hpp>

namespace benchmarks {

/// Adds a subcommand with its options; parsing it runs the benchmark, which prints its results.
void add_averaged_model(CLI::App& app);
void add_call_history(CLI::App& app);
void add_checkpoint(CLI::App& app);
void add_diloco(CLI::App& app);
void add_elastic(CLI::App& app);
void add_hooks(CLI::App& app);
void add_join(CLI::App& app);
void add_messages(CLI::App& app);
void add_mixed_precision(CLI::App& app);
void add_muon(CLI::App& app);
void add_offload(CLI::App& app);
void add_optimizers(CLI::App& app);
void add_prefetch(CLI::App& app);
void add_profiler(CLI::App& app);
void add_recompute(CLI::App& app);
void add_sampler(CLI::App& app);
void add_store(CLI::App& app);
void add_stream(CLI::App& app);
void add_tensor_collectives(CLI::App& app);
void add_zero(CLI::App& app);

}  // namespace benchmarks
