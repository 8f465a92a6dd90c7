#pragma once

#include <ddp/export.h>

// Not a public header: for modules that communicate in forward.

namespace ddp::detail {

/// Whether this thread is in the body of a join() that continues when ranks have no input left.
/// Such ranks do not run the collectives of a module's forward.
DDP_API bool in_uneven_join();

}  // namespace ddp::detail
