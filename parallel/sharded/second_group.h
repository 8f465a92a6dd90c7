#pragma once

#include <ddp/process_group.h>

namespace ddp {

/// A second group of the same ranks, in which collectives have an order of their own. All who ask
/// for it while it is used get the same.
///
/// Collective: yes. Blocks: host.
ProcessGroup second_group_of(const ProcessGroup& group);

}  // namespace ddp
