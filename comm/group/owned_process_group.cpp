#include "group/owned_process_group.h"

#include <ddp/internal/check.h>

namespace ddp {

void OwnedProcessGroup::shutdown() {
  if (!owner_.is_this_one()) return;
  is_shut_down_ = true;
  c10d::ProcessGroup::shutdown();
}

void OwnedProcessGroup::check_in_use() const {
  DDP_CHECK(
      !is_shut_down_,
      "process group: expected one that is in use, got one that was destroyed on rank ", getRank(),
      " of ", getSize(), ". Make a new group, and a new wrapper of the module over it.");
}

void OwnedProcessGroup::abort() {
  if (owner_.is_this_one()) c10d::ProcessGroup::abort();
}

void OwnedProcessGroup::release_resources() {
  if (!owner_.is_this_one()) return;
  on_last_reference();
  c10d::ProcessGroup::release_resources();
  self_.reset();
}

}  // namespace ddp
