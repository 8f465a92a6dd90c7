#pragma once

#include <optional>

#include <sys/ioctl.h>

#include "launch/pipe.h"

namespace ddp::launch {

/// A terminal without a screen. C and C++ libraries write each line at once to a terminal; bytes
/// for a pipe they keep until their buffer is full, and lose them when the process dies.
struct PseudoTerminal {
  Fd read;   // the launcher's end; once all writers are gone, reading fails with EIO
  Fd write;  // the rank's end: bytes pass unchanged, nothing is echoed
};

/// Makes a pseudo-terminal whose ends no program started from here inherits.
///
/// \return nothing where the system has none left, or none at all.
std::optional<PseudoTerminal> make_pseudo_terminal();

/// Returns the size of the terminal that `fd` is; nothing where it is none, or has no size.
std::optional<winsize> terminal_size(int fd);

/// Sets the size of a pseudo-terminal; the kernel sends SIGWINCH to the programs on it.
void set_terminal_size(const Fd& fd, const winsize& size);

}  // namespace ddp::launch
