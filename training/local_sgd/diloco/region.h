#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// This rank's place among the regions, and what a region's leader and its other ranks tell each
/// other. With regions of one rank, that rank is the leader.
class Region {
 public:
  /// \param leaders, local  as in DiLoCoOptions.
  /// \param settings  the same text on every rank, or ranks have other settings.
  /// \param problem  why this rank cannot take part; "": it can.
  /// \throws c10::Error  with the same text on every rank: for a problem, other settings, and a
  ///         region that has several leaders, or none beside regions that have one.
  ///
  /// Collective: over `local` and `leaders`. Blocks: host.
  Region(
      ProcessGroup leaders, ProcessGroup local, const std::string& settings,
      const std::string& problem);

  bool is_leader() const { return is_leader_; }
  /// The number of regions.
  int64_t count() const { return count_; }
  /// Empty on ranks that are no leaders, and where there is one region.
  const ProcessGroup& leaders() const { return leaders_; }

  /// Gives all ranks of all regions the first leader's values: float32, on the CPU.
  void share_of_first(at::Tensor& values) const;

  /// Gives the ranks of the region what the leader's `mean` holds once that is ready. While the
  /// leader waits, it says so every now and then, so that the others' waits do not end.
  ///
  /// \param mean  on the leader; not used on the others.
  /// \param elements  of the mean: float32.
  /// \throws the exception of `mean` on the leader; c10::Error with its text on the others.
  at::Tensor share(const std::shared_future<at::Tensor>& mean, int64_t elements) const;

 private:
  void share_bytes(at::Tensor& values) const;
  int64_t share_number(int64_t number) const;

  const ProcessGroup leaders_;
  const ProcessGroup local_;
  bool is_leader_ = true;
  int leader_ = 0;  // its rank in local_
  int64_t count_ = 1;
};

}  // namespace ddp
