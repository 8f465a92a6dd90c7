#pragma once

namespace ddp::backends::shm {

/// Registers handlers for every later fork of this process: `before` runs first, then `in_parent`
/// and `in_child`; also after the library's static objects were destroyed.
///
/// \throws c10::Error  if the system has no memory for the registration.
void add_fork_handlers(void (*before)(), void (*in_parent)(), void (*in_child)());

}  // namespace ddp::backends::shm
