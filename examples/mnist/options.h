#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "../common/usage_error.h"

namespace mnist {

/// The options of the command line; every rank gets the same.
struct Options {
  int64_t epochs = 6;
  size_t batch_size = 32;  // per rank
  double lr = 0.002;
  int64_t seed = 1;
  std::string backend;                  // empty: the library's choice
  std::optional<double> bucket_cap_mb;  // MiB; unset: the library's choice
  bool tune_bucket_cap = false;         // instead of bucket_cap_mb
  int threads = 0;                      // per rank; 0: OMP_NUM_THREADS
  std::string data = MNIST_DEFAULT_DATA;
  std::string save;               // empty: do not
  std::string checkpoint;         // folder; empty: do not
  int64_t checkpoint_every = 50;  // steps
  bool leave_on_signal = false;   // save and leave on all ranks at a signal to one
  bool resume = false;            // continue from the last one there
  std::string trace;              // empty: do not
};

using examples::UsageError;

/// Reads the command line.
///
/// \param help  receives the text of --help.
/// \return nothing when --help was given.
/// \throws UsageError
std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace mnist
