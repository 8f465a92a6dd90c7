#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace ddp {

/// What each rank tells the others with a reduced backward pass, summed or averaged over ranks
/// (what counts is which numbers are above zero): a few numbers that travel for nothing behind the
/// gradients of the last bucket.
///
/// Layout, in elements: whether the rank met problems; its count of training forwards modulo 4 and
/// modulo 5, each one-hot, so that any sum tells whether all agree, in any dtype; then, where usage
/// is tracked, whether each parameter had a gradient.
class StatusBoard {
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
    friend class StatusBoard;
    explicit Arrival(at::Tensor host) : host_(std::move(host)) {}

    at::Tensor host_;
    std::optional<c10::Event> event_;  // none where it was there at once
  };

  StatusBoard(size_t parameters, bool tracks_usage)
      : parameters_(parameters), tracks_usage_(tracks_usage) {}

  /// Elements of storage that the status takes.
  int64_t size() const;

  bool tracks_usage() const { return tracks_usage_; }

  /// Uses `storage`, 1-D of `size()` elements of any floating-point dtype.
  void use(at::Tensor storage) { storage_ = std::move(storage); }
  const at::Tensor& storage() const { return storage_; }

  /// Does not wait for a device: it is written behind what the current stream has to do.
  ///
  /// \param forwards  empty: this rank stands in for one, and has no count to compare.
  void write(
      size_t problems, const std::optional<uint64_t>& forwards, const std::vector<char>& used);
  /// What came back, once the current stream has done what it has to do. The storage may be
  /// written to again.
  Arrival fetch() const;

 private:
  size_t parameters_;
  bool tracks_usage_;
  at::Tensor storage_;
};

}  // namespace ddp
