#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "../common/usage_error.h"

namespace transformer {

/// The shape of the network.
struct Shape {
  int64_t context = 64;  // characters that the network sees
  int64_t width = 128;
  int64_t heads = 4;
  int64_t layers = 3;
  double dropout = 0.1;
  bool checkpoint_activations = false;
  bool amp = false;
};

/// Regions of ranks, which train together over slow links.
struct Regions {
  int64_t sync_every = 0;   // steps from one exchange to the next; 0: all ranks average every step
  int64_t count = 0;        // 0: each rank is one
  std::string coordinator;  // of regions that may join and leave, each a job; empty: they may not
  double outer_lr = 0.7;
  double outer_momentum = 0.9;
  int64_t fragments = 1;
  int64_t overlap = 0;  // steps
  std::string wire = "bfloat16";

  bool are_used() const { return sync_every > 0; }
};

/// The options of the command line; every rank gets the same.
struct Options {
  std::string text = TRANSFORMER_DEFAULT_TEXT;
  Shape shape;
  int64_t steps = 1000;
  size_t batch_size = 16;  // windows per model and backward pass
  int64_t accumulate = 1;  // backward passes a step
  double lr = 0.003;
  int64_t warmup = 100;  // steps
  double clip = 1;
  int zero = 0;       // stage; 0: every rank has AdamW's whole state
  bool fsdp = false;  // cut parameters, gradients and state over the ranks
  int64_t dp = 0;     // replicas; 0: as many as the ranks make
  int64_t tp = 1;     // ranks that have a part of each layer each
  int64_t cp = 1;     // ranks that have a part of each window each
  int64_t pp = 1;     // ranks that have some of the layers each
  std::string schedule = "1f1b";
  int64_t microbatches = 4;  // of a batch, with --pp
  Regions regions;
  bool elastic = false;  // go on where ranks are lost
  int64_t seed = 1;
  std::string backend;  // empty: the library's choice
  int64_t report_every = 100;
  std::string checkpoint;          // folder; empty: do not
  int64_t checkpoint_every = 100;  // steps
  bool leave_on_signal = false;    // save and leave on all ranks at a signal to one
  bool resume = false;             // continue from the last one there
  std::string load;                // empty: begin with random weights
  std::string save;                // empty: do not
  int64_t sample = 200;            // characters; 0: none
  std::string prompt;              // empty: the text's first character
  double temperature = 0.7;

  /// Stages of a pipeline on each rank.
  int64_t stages_a_rank() const { return schedule == "interleaved" ? 2 : 1; }
};

using examples::UsageError;

/// Reads the command line.
///
/// \param help  receives the text of --help.
/// \return nothing when --help was given.
/// \throws UsageError
std::optional<Options> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace transformer
