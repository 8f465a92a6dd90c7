#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "../common/usage_error.h"

namespace cifar10 {

/// The options of the command line; every rank gets the same.
struct Options {
  std::string model = "small";
  int64_t epochs = 20;
  size_t batch_size = 32;  // per rank
  double lr = 0.2;         // for 128 images a step, over all ranks
  double ema = 0;          // decay of the average of weights that is tested; 0: none
  int64_t seed = 1;
  int workers = 1;  // loader threads per rank
  bool sync_batch_norm = false;
  bool amp = false;
  std::string backend;                  // empty: the library's choice
  std::optional<double> bucket_cap_mb;  // MiB; unset: the library's choice
  std::string data = CIFAR10_DEFAULT_DATA;
  std::string save;              // empty: do not
  std::string checkpoint;        // folder; empty: do not
  bool leave_on_signal = false;  // save and leave on all ranks at a signal to one
  bool resume = false;           // continue from the last one there
  std::string trace;             // empty: do not
};

using examples::UsageError;

/// Reads the command line.
/// \param help  receives the text of --help.
/// \param help  gets the text that --help asks for.
/// \return nothing when --help was given.
/// \throws UsageError
std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace cifar10
