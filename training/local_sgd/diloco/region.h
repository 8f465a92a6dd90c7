#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <ddp/process_group.h>

namespace ddp {

/// This rank's place among the regions, and what a region's leader and its other ranks tell each
/// other. With regions of one rank, that rank is the leader.
class Region {
 public:
  /// \param leaders, local  as in DiLoCoOptions.
  /// \param is_elastic  on one rank of each region, where regions may join and leave.
  /// \param settings  the same text on every rank, or ranks have other settings.
  /// \param problem  why this rank cannot take part; "": it can.
  /// \throws c10::Error  with the same text on every rank: for a problem, other settings, and a
  ///         region that has several leaders, or none beside regions that have one.
  ///
  /// Collective: over `local` and `leaders`. Blocks: host.
  Region(
      ProcessGroup leaders, ProcessGroup local, bool is_elastic, const std::string& settings,
      const std::string& problem);

  bool is_leader() const { return is_leader_; }
  /// Whether regions may join and leave; known to all ranks.
  bool is_elastic() const { return count_ == 0; }
  /// The number of regions; 0 where it may change.
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

  /// Waits on all ranks of the region for what the leader waits for, in the same way.
  template <typename T>
  void await(const std::shared_future<T>& result) const {
    if (!local_) return static_cast<void>(result.get());
    await_leader([&] {
      if (result.wait_for(kReportInterval) != std::future_status::ready) return false;
      result.get();
      return true;
    });
  }

  /// The leader's. Collective: over `local`.
  void share_values(at::Tensor& values) const;
  int64_t share_number(int64_t number) const;
  std::string share_text(const std::string& text) const;

 private:
  static constexpr std::chrono::milliseconds kReportInterval{200};

  /// \param is_ready  on the leader: waits for a moment; throws what the others throw then, too.
  void await_leader(c10::function_ref<bool()> is_ready) const;

  const ProcessGroup leaders_;
  const ProcessGroup local_;
  bool is_leader_ = true;
  int leader_ = 0;  // its rank in local_
  int64_t count_ = 1;
};

}  // namespace ddp
