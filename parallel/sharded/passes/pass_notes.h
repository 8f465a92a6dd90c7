#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sharded/copies/host_copies.h"
#include "sharded/sharded_unit.h"

namespace ddp {

/// The notes that ranks exchange of the gradients which a backward pass reduced, in one small
/// reduction after those of the gradients: which parameters got one, and what has to be the same on
/// all ranks.
class PassNotes {
 public:
  using Units = std::vector<std::shared_ptr<ShardedUnit>>;

  /// Writes this rank's notes, and begins to exchange them.
  ///
  /// \param order  the indices of the units that were reduced, in order; not empty.
  ///
  /// Collective: yes. Blocks: the host where the group's collectives do.
  PassNotes(const UnitGradients::Groups& groups, const Units& units, std::vector<size_t> order);

  /// Whether the exchange runs on a device while the host goes on.
  bool runs_ahead() const { return runs_ahead_; }
  /// By parameter of a unit: whether a rank gave a gradient. Waits for the exchange where this rank
  /// gave none for a parameter that requires one; else its own notes say it.
  std::vector<bool> has_gradient(const ShardedUnit& unit);
  /// Waits for the exchange.
  ///
  /// \throws c10::Error  on all ranks, where they did different things.
  void check(const Units& units);

 private:
  void write(const Units& units, float* words) const;
  void exchange(c10::Device device);
  const float* await();
  void check_order(const Units& units, const float* words) const;

  const UnitGradients::Groups groups_;
  const std::vector<size_t> order_;
  std::vector<int64_t> first_words_;  // by unit; and the end of the last
  bool runs_ahead_ = false;
  at::Tensor maxima_;  // of all ranks' words, after await(); before the exchange this rank's words
  CopyEnd copied_;     // of the maxima
};

}  // namespace ddp
