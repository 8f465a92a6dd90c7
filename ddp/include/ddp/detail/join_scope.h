#pragma once

#include <ddp/export.h>

// No public header: what modules that communicate in forward ask about the join around them.

namespace ddp::detail {

/// Whether this thread is in the body of a join() that goes on without ranks that have no input
/// left, which then do not take part in collectives of a module.
DDP_API bool in_join_that_goes_on();

}  // namespace ddp::detail
