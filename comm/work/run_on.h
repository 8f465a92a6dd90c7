#pragma once

#include "calls/collective.h"
#include "work/composite_work.h"

namespace ddp {

/// Calls the method of a backend that has the collective's form.
WorkPtr run_on(c10d::Backend& backend, const Collective& collective);

}  // namespace ddp
