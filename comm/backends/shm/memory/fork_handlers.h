#pragma once

namespace ddp::backends::shm {

/// Has every later fork of this process call `before` first, and then `in_parent` and `in_child`;
/// also when the library's static objects have gone.
///
/// \throws c10::Error  where the system has no memory to note it.
void on_fork(void (*before)(), void (*in_parent)(), void (*in_child)());

}  // namespace ddp::backends::shm
