#pragma once

#include <ddp/process_group.h>

namespace ddp {

/// Makes another group the default group; empty: none. The previous one is not shut down.
///
/// \return  the previous one.
ProcessGroup replace_default_group(ProcessGroup group);

}  // namespace ddp
