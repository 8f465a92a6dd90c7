#pragma once

#include <ddp/internal/system/fd.h>

namespace ddp::launch {

struct Pipe {
  Fd read;
  Fd write;
};

/// Makes a pipe whose ends no program started from here inherits.
///
/// \throws std::system_error  when no descriptors are left.
Pipe make_pipe();

/// Makes reads of `fd` return at once. Only for descriptors that no other process shares.
void set_nonblocking(const Fd& fd);

/// Opens /dev/null in the place of a closed stdin, stdout or stderr: otherwise the next pipe would
/// take its number, and a rank's output would end up in it.
void open_missing_standard_fds();

}  // namespace ddp::launch
