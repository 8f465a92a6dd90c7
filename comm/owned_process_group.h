#pragma once

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// A process group that ends in the process that made it, and in no other.
///
/// A process that a rank forked has a copy of the group. There, abort() and shutdown() do nothing,
/// and the last reference to go leaks the group with its backends and its store. Their destructors
/// would wait for threads that the forked process has not, and write to the rank's sockets and
/// memory.
class OwnedProcessGroup : public c10d::ProcessGroup {
 public:
  static c10::intrusive_ptr<c10d::ProcessGroup> make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

  using c10d::ProcessGroup::ProcessGroup;
  void shutdown() override;
  void abort() override;

  void release_resources() override;

 private:
  const OwnerProcess owner_;
  // As long as there is a weak reference, c10 does not destroy the group when the last other
  // reference goes, but calls release_resources(). That drops this one, in the process that made
  // it.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> self_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

}  // namespace ddp
