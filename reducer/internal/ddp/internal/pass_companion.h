#pragma once

#include <optional>
#include <string>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace ddp {

/// What all ranks agree on about a reduced pass.
struct PassTerms {
  /// What this rank's gradients are multiplied by before they are summed; unset, on all ranks or on
  /// none: one over the world size, which gives the mean. A communication hook sees them unscaled.
  std::optional<double> scale = {};
  /// The rank whose order of gradients, and whose companion's data, all ranks take.
  int source = 0;
};

/// What travels with each averaged backward pass beside the gradients, such as a model's buffers.
class PassCompanion {
 public:
  virtual ~PassCompanion() = default;

  /// Whether the backward pass that begins must not communicate yet, because another reducer's
  /// does. begin() then comes when autograd is done with it, and so do all of its buckets.
  virtual bool must_wait() { return false; }
  /// The backward pass begins to communicate, on one of autograd's threads: may agree on its terms.
  virtual void begin(PassTerms& terms) { (void)terms; }
  /// Autograd is done, and only the last bucket is still to be sent: sends rank `source`'s data.
  virtual void start(int source) = 0;
  /// Waits for what was sent, with `wait`, and takes it over.
  virtual void finish(c10::function_ref<void(c10d::Work&)> wait) = 0;
  /// Behind finish(): why the pass throws, the same text on every rank; "" for nothing.
  virtual std::string objection() { return {}; }
};

}  // namespace ddp
