#pragma once

#include "calls/collective.h"
#include "work/composite_work.h"

namespace ddp {

/// Runs the collective, or calls the method of a class of others that has its form.
WorkPtr run_on(c10d::Backend& backend, Collective collective);

}  // namespace ddp
