// Records what is called while a DeferredInit guard exists.
#pragma once

#include "deferred/tape.h"

namespace ddp {

/// Whether this thread has a guard.
bool is_recording();
/// Begins and ends one; they nest. Each begin needs its end on the same thread.
void begin_recording();
void end_recording();

/// Has `check` look at the values of a deferred tensor when they are first computed.
void check_when_materialized(const at::Tensor& tensor, ValueCheck check);

}  // namespace ddp
