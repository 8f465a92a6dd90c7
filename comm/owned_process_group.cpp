#include "owned_process_group.h"

namespace ddp {

c10::intrusive_ptr<c10d::ProcessGroup> OwnedProcessGroup::make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  auto group = c10::make_intrusive<OwnedProcessGroup>(store, rank, size);
  group->self_ = c10::intrusive_ptr<c10d::ProcessGroup>(group);
  return group;
}

void OwnedProcessGroup::shutdown() {
  if (owner_.is_this_one()) c10d::ProcessGroup::shutdown();
}

void OwnedProcessGroup::abort() {
  if (owner_.is_this_one()) c10d::ProcessGroup::abort();
}

void OwnedProcessGroup::release_resources() {
  if (!owner_.is_this_one()) return;
  c10d::ProcessGroup::release_resources();
  self_.reset();
}

}  // namespace ddp
