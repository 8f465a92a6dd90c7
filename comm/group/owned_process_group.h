#pragma once

#include <atomic>

#include <ddp/internal/owner_process.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

/// A process group that is shut down only in the process that made it.
///
/// A process that a rank forked has a copy of the group. There, abort() and shutdown() do nothing,
/// and dropping the last reference leaks the group with its backends and its store. Their
/// destructors would wait for threads that the forked process does not have, and write to the
/// rank's sockets and memory.
///
/// After shutdown() it starts no collectives, whatever its backends would do.
class OwnedProcessGroup : public c10d::ProcessGroup {
 public:
  /// \tparam Group  this class or a derived one.
  template <typename Group>
  static c10::intrusive_ptr<Group> make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
    auto group = c10::make_intrusive<Group>(store, rank, size);
    group->self_ = c10::intrusive_ptr<c10d::ProcessGroup>(group);
    return group;
  }

  using c10d::ProcessGroup::ProcessGroup;
  void shutdown() override;
  void abort() override;
  void release_resources() override;

 protected:
  /// Called in the process that made the group when the last reference is dropped, before the
  /// backends and the store are destroyed.
  virtual void on_last_reference() {}

  /// \throws c10::Error  after shutdown().
  void check_in_use() const;

 private:
  const OwnerProcess owner_{};
  std::atomic<bool> is_shut_down_{false};
  // While a weak reference exists, c10 calls release_resources() instead of the destructor when the
  // last other reference is dropped. In the process that made the group, that drops this one.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> self_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

}  // namespace ddp
