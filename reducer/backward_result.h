#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

namespace ddp {

/// Where autograd will put the outcome, or the exception, of the backward pass that the calling
/// thread runs a part of; empty outside of one.
c10::intrusive_ptr<c10::ivalue::Future> current_backward_result();

}  // namespace ddp
