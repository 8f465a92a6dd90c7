#pragma once

#include <exception>

#include <ddp/internal/forward_count.h>
#include <ddp/process_group.h>

namespace ddp {

/// Tells the other ranks which pass of a sharded model threw on this one: they wait for its gathers
/// and reductions. From the first one on, autograd calls ShardedModel::backward_failed() of the
/// models in whose graph a backward pass threw. A pass that throws on every rank leaves the model
/// usable.
class FailedPasses {
 public:
  /// Collective: no; in the same order on all ranks.
  explicit FailedPasses(const ProcessGroup& group);

  /// A forward pass begins: after one that threw, when it has thrown on all ranks.
  ///
  /// \throws c10::DistBackendError  where it did not.
  void begin();
  /// The pass threw, in forward or in backward.
  ///
  /// \param doing  "forward".
  void note(const char* doing, const std::exception_ptr& cause) noexcept;

 private:
  const std::shared_ptr<GroupMonitor> monitor_;
  ForwardCount forwards_;
  bool is_noted_ = false;  // of this pass
};

}  // namespace ddp
