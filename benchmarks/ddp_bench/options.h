#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <ddp/distributed_data_parallel.h>

#include "examples/common/usage_error.h"

namespace ddp_bench {

/// The options of the command line; the same on every rank.
struct Options {
  std::string model = "mlp";
  std::vector<std::string> modes = {"none", "c10d", "ddp"};
  int iters = 20;
  int rounds = 5;
  int warmup = 10;
  int threads = 1;  // per rank
  int64_t seed = 1;
  std::string backend;  // empty: the library's choice; with nccl the ranks are on GPUs
  at::ScalarType dtype = at::kFloat;
  int64_t batch = 1;          // factor of the model's own batch size
  std::vector<double> sweep;  // bucket_cap_mb, one after the other; empty: as in `wrapper`
  ddp::DistributedDataParallelOptions wrapper;  // without a group
  std::string timeline;                         // the file for a step's timeline; empty: none
  bool memory = false;                          // measure the memory of one mode, and no times
  bool fsdp = false;                            // time layers that are sharded, and no modes
  std::string fsdp_memory;                      // measure the memory of one of those ways
  bool tp = false;                              // time linear layers that are cut, and no modes
  bool pp = false;                              // time a pipeline, and no modes
  std::string schedule = "1f1b";                // of the pipeline
  int64_t microbatches = 8;
  bool sleep = false;       // only stages that sleep
  int64_t message_kib = 1;  // of stages that sleep
};

using examples::UsageError;

/// Reads the command line.
///
/// \param help  gets the text that --help asks for.
/// \return nothing when --help was given.
/// \throws UsageError
std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace ddp_bench
