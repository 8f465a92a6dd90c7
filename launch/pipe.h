#pragma once

#include <optional>

#include <ddp/internal/system/fd.h>
#include <sys/ioctl.h>

namespace ddp::launch {

struct Pipe {
  Fd read;
  Fd write;
};

/// Makes a pipe whose ends no program started from here inherits.
///
/// \throws std::system_error  when no descriptors are left.
Pipe make_pipe();

/// Makes a pseudo-terminal, whose ends no program started from here inherits: a terminal without a
/// screen. C and C++ libraries write each line at once to a terminal; bytes for a pipe they keep
/// until their buffer is full, and lose them when the process dies. Bytes pass unchanged, and
/// nothing is echoed; once all writers are gone, reading fails with EIO.
///
/// \return nothing where the system has none left, or none at all.
std::optional<Pipe> make_pseudo_terminal();

/// Returns the size of the terminal that `fd` is; nothing where it is none, or has no size.
std::optional<winsize> terminal_size(int fd);

/// Sets the size of a pseudo-terminal; the kernel sends SIGWINCH to the programs on it.
void set_terminal_size(const Fd& fd, const winsize& size);

/// Makes reads of `fd` return at once. Only for descriptors that no other process shares.
void set_nonblocking(const Fd& fd);

/// Opens /dev/null in the place of a closed stdin, stdout or stderr: otherwise the next pipe would
/// take its number, and a rank's output would end up in it.
void open_missing_standard_fds();

}  // namespace ddp::launch
