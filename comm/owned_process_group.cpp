#include "owned_process_group.h"

namespace ddp {

void OwnedProcessGroup::shutdown() {
  if (owner_.is_this_one()) c10d::ProcessGroup::shutdown();
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
