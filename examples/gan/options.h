#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "../common/usage_error.h"

namespace gan {

/// The options of the command line; every rank gets the same.
struct Options {
  int64_t epochs = 40;
  size_t batch_size = 16;  // per rank
  double lr = 0.002;
  double ema = 0;  // decay of the average that makes the samples; 0: none
  int64_t seed = 1;
  std::string backend;  // empty: the library's choice
  std::string data = GAN_DEFAULT_DATA;
  std::string picture;  // empty: none
};

using examples::UsageError;

/// Reads the command line.
///
/// \param help  receives the text of --help.
/// \return nothing when --help was given.
/// \throws UsageError
std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace gan
