#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "stats/stragglers.h"
#include "status/problem_report.h"

namespace ddp {

/// Exchanges each rank's status with a reduced backward pass. The status is a few numbers, appended
/// to the last bucket, which costs no extra message, or reduced by a collective of their own. A
/// reader checks only which of their sums, or averages, are above zero, except for times.
///
/// Layout, in elements: whether the rank met problems; whether it asks the others; the wrapper's
/// count of forwards modulo 4 and modulo 5, each one-hot, so that the sums show whether all ranks
/// agree, in any dtype; for each rank its times, of which a reader compares only one with another;
/// then, where usage is tracked, whether each parameter had a gradient.
///
/// Threads: report() any; the rest as the Reducer.
class StatusAgreement {
 public:
  struct Sum {
    bool problems = false;      // at least one rank met one
    bool asks = false;          // at least one rank asks the others (PassCompanion::asks())
    bool same_forwards = true;  // all ranks ran as many forwards (modulo 20)
    /// Sums or averages: in one unknown unit. Empty where a rank has none of this step.
    TimesOfRanks times;
    std::vector<char> unused;  // by parameter: no rank used it; empty where usage is not tracked
  };

  /// Pinned host memory, which a device copies a status from, and its sum to, without the host.
  struct Staging {
    explicit Staging(const at::Tensor& status);

    /// Whether the memory can take a status like `status`, as the device has done its copies.
    bool can_take(const at::Tensor& status) const;

    at::Tensor memory;
    c10::Event arrived;      // the sum
    bool is_fetched = true;  // else `arrived` is of an older status
  };

  /// A sum that is being copied to the host.
  class PendingSum {
   public:
    bool is_ready() const { return !staging_ || staging_->arrived.query(); }
    /// Waits for it.
    Sum read() const;

   private:
    friend class StatusAgreement;
    PendingSum(at::Tensor host, int ranks, std::shared_ptr<const Staging> staging = {})
        : host_(std::move(host)), ranks_(ranks), staging_(std::move(staging)) {}

    at::Tensor host_;
    int ranks_;
    std::shared_ptr<const Staging> staging_;  // null where the sum is on the host already
  };

  /// \param ranks  their number, and `rank` this one.
  /// \param tracked  the number of parameters whose usage the ranks exchange.
  /// \param defers  the status of a pass is read at the end of the next one: the host runs ahead of
  ///        a device. Which pass is read does not depend on timing, so it is the same on every
  ///        rank.
  StatusAgreement(int rank, int ranks, size_t tracked, bool defers);

  /// The number of elements of the status.
  static int64_t size(int ranks, size_t tracked);
  int64_t size() const { return size(ranks_, tracked_); }
  bool defers() const { return defers_; }

  /// Reports a problem of a pass: the next status makes it an error on every rank.
  void report(Problem problem);

  /// Stores the status in the end of the last bucket, 1-D of `size()` elements.
  void use_bucket_tail(at::Tensor tail);
  /// Stores the status on the host: a group of one sends it to no rank.
  void use_host_memory();
  /// Stores the status in memory of its own on `device`, and sends it in a collective of its own.
  void use_own_collective(c10::Device device);
  bool uses_own_collective() const { return uses_own_collective_; }

  /// Writes this rank's status, with all reported problems. Does not wait for a device: the write
  /// is queued on the current stream.
  ///
  /// \param forwards  empty: this rank has no input, and no count to compare.
  /// \return the reported problems.
  std::vector<Problem> write(
      const std::optional<uint64_t>& forwards, const std::vector<char>& used, bool asks = false,
      const RankTimes& times = {});
  /// Called after write(): a rank also has a problem where `flag`, a number on the device of the
  /// status that is not known yet, is above zero. The rank finds out which after the status is
  /// read.
  void add_problem_flag(const at::Tensor& flag) { storage_.narrow(0, 0, 1).add_(flag); }
  /// Memory with the dtype and device of the status.
  const at::Tensor& storage() const { return storage_; }
  /// Called in place of write() for a pass that is captured and replayed: writes a status without
  /// problems, with device operations only, because the host does not run in a replay.
  ///
  /// \return the reported problems.
  std::vector<Problem> write_zeros();
  /// Sends a status that has its own collective. Null in a group of one.
  c10::intrusive_ptr<c10d::Work> send(c10d::ProcessGroup& group) const;
  /// Copies the reduced status to the host, in the order of the current stream. The storage may be
  /// written to again.
  PendingSum fetch();

 private:
  std::vector<Problem> take_reported();
  Staging& next_staging();

  const int rank_;
  const int ranks_;
  const size_t tracked_;
  const bool defers_;
  std::vector<float> head_;  // what write() sends before the flags of usage
  at::Tensor storage_;
  /// Two, for the sum of a pass is read after the next pass has written its status.
  std::array<std::shared_ptr<Staging>, 2> staging_;
  size_t turn_ = 0;  // the one of staging_ that write() used last
  bool uses_own_collective_ = false;
  std::mutex mutex_;  // guards reported_
  std::vector<Problem> reported_;
};

}  // namespace ddp
