#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "problem_report.h"

namespace ddp {

/// What each rank tells the others with a reduced backward pass, and what they agree on by it. A
/// few numbers travel for nothing behind the gradients of the last bucket, or in a collective of
/// their own; what counts is which of their sums, or averages, are above zero.
///
/// Layout, in elements: whether the rank met problems; its count of training forwards modulo 4 and
/// modulo 5, each one-hot, so that any sum tells whether all agree, in any dtype; then, where usage
/// is tracked, whether each parameter had a gradient.
///
/// Threads: report() any; the rest as the Reducer.
class StatusAgreement {
 public:
  struct Sum {
    bool problems = false;      // some rank met one
    bool same_forwards = true;  // all ranks ran as many forwards (modulo 20)
    std::vector<char> unused;   // by parameter: on no rank; empty where usage is not tracked
  };

  /// A sum on its way to the host.
  class Arrival {
   public:
    bool is_here() const { return !event_ || event_->query(); }
    /// Waits for it.
    Sum read() const;

   private:
    friend class StatusAgreement;
    explicit Arrival(at::Tensor host) : host_(std::move(host)) {}

    at::Tensor host_;
    std::optional<c10::Event> event_;  // none where it was there at once
  };

  /// \param defers  the verdict on a pass is due at the end of the next one: the host runs ahead of
  ///        a device. Which pass is judged does not depend on timing, so it is the same on every
  ///        rank.
  StatusAgreement(size_t parameters, bool tracks_usage, bool defers)
      : parameters_(parameters), tracks_usage_(tracks_usage), defers_(defers) {}

  /// Elements of storage that the status takes.
  ///
  /// \param tracked  parameters whose usage is tracked.
  static int64_t size(size_t tracked);
  int64_t size() const { return size(tracks_usage_ ? parameters_ : 0); }
  bool tracks_usage() const { return tracks_usage_; }
  bool defers() const { return defers_; }

  /// Something that makes a pass wrong: becomes an error on every rank with the next status.
  void report(Problem problem);

  /// Uses the end of the last bucket, 1-D of `size()` elements.
  void travel_in(at::Tensor tail);
  /// Uses memory of the host: a group of one has nobody to tell.
  void stay_on_host();
  /// Uses memory of its own on `device`, and a collective of its own.
  void travel_alone(c10::Device device);
  bool travels_alone() const { return travels_alone_; }

  /// Writes this rank's status, with all that was reported. Does not wait for a device: it is
  /// written behind what the current stream has to do.
  ///
  /// \param forwards  empty: this rank has no input, and no count to compare.
  /// \return what was reported.
  std::vector<Problem> write(
      const std::optional<uint64_t>& forwards, const std::vector<char>& used);
  /// In place of write(), for a pass that is captured and replayed: writes that there is nothing to
  /// tell, by the device alone, for the host has no part in a replay.
  ///
  /// \return what was reported.
  std::vector<Problem> write_nothing();
  /// Sends a status that travels alone. Empty in a group of one.
  c10::intrusive_ptr<c10d::Work> send(c10d::ProcessGroup& group) const;
  /// What came back, once the current stream has done what it has to do. The storage may be
  /// written to again.
  Arrival fetch() const;

 private:
  std::vector<Problem> take_reported();

  const size_t parameters_;
  const bool tracks_usage_;
  const bool defers_;
  at::Tensor storage_;
  bool travels_alone_ = false;
  std::mutex mutex_;  // guards reported_
  std::vector<Problem> reported_;
};

}  // namespace ddp
