#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

namespace ddp {

/// The future in which autograd stores the result, or the exception, of the backward pass that the
/// calling thread runs; empty outside of a backward pass.
c10::intrusive_ptr<c10::ivalue::Future> current_backward_result();

}  // namespace ddp
