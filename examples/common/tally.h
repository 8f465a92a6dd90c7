#pragma once

#include <cstdint>
#include <string>

#include <ddp/process_group.h>
#include <torch/serialize/archive.h>

namespace examples {

/// Sums over samples, of this rank or of all.
struct Tally {
  double loss_sum = 0;
  int64_t correct = 0;
  int64_t samples = 0;

  Tally& operator+=(const Tally& other);

  /// Saves the sums in a checkpoint.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  double mean_loss() const { return samples > 0 ? loss_sum / static_cast<double>(samples) : 0; }
  /// Prints "98.61% (355/360)".
  std::string accuracy() const;
};

/// Adds the ranks' tallies. Collective: yes.
Tally sum_over_ranks(const Tally& own, const ddp::GroupArg& group = {});

}  // namespace examples
