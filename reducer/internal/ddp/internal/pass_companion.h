#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// The parameters of a reduced pass that all ranks agree on.
struct PassTerms {
  /// The factor of this rank's gradients before they are summed; unset, on all ranks or on none:
  /// one over the world size, which gives the mean. A communication hook gets them unscaled.
  std::optional<double> scale = {};
  /// The rank whose order of gradients, and whose companion's data, all ranks take.
  int source = 0;
  /// In a pass that this rank joins without one of its own: whether the other ranks add its
  /// averages to those of earlier passes, which `.grad` still holds.
  bool adds = false;
};

/// An error of a pass that every rank throws.
struct PassError {
  std::string text = {};              // the same on every rank; "" for none
  std::vector<int> wrong_ranks = {};  // that have other values than most ranks, where that is why
};

/// Data that is sent with each reduced backward pass beside the gradients, such as a model's
/// buffers.
class PassCompanion {
 public:
  virtual ~PassCompanion() = default;

  /// Whether the backward pass that begins must not communicate yet, because another reducer's pass
  /// does. The reducer then calls begin(), and launches all buckets, after autograd is done.
  virtual bool must_wait() { return false; }
  /// Called on one of autograd's threads when the backward pass begins to communicate: may agree on
  /// the terms with the other ranks.
  virtual void begin(PassTerms& terms) { (void)terms; }
  /// Calls `act` while the parameters have the dtypes that they have between passes.
  virtual void with_own_dtypes(c10::function_ref<void()> act) { act(); }
  /// Called when autograd is done: parameters have their own dtypes from then on.
  virtual void autograd_done() {}
  /// Called when the backward pass threw before that, with a text that names this rank: lets the
  /// ranks that wait for it know.
  virtual void failed(const std::string& why) { (void)why; }
  /// Called when autograd is done and all buckets but the last are launched: sends rank `source`'s
  /// data.
  virtual void start(int source) = 0;
  /// Waits for that data with `wait`, and stores it.
  virtual void finish(c10::function_ref<void(c10d::Work&)> wait) = 0;
  /// The number of training forward passes that this rank has begun since the last reduced pass.
  /// Every rank has to begin as many: where the ranks' numbers differ modulo 20, the pass is an
  /// error on all of them.
  virtual uint64_t forwards() const { return 0; }
  /// Whether this rank asks all others to call answer(), which they do at the end of this pass or
  /// of the next one. Costs no message.
  virtual bool asks() const { return false; }
  /// Collective: may be, every rank calls it.
  virtual void answer() {}
  /// Called after finish(): the error that the pass throws.
  virtual PassError error() { return {}; }
  /// Called at the end of the pass, also of one that is an error on every rank.
  virtual void end() {}
};

}  // namespace ddp
