#pragma once

#include <optional>

#include <sys/ioctl.h>

#include "launch/fd.h"

namespace ddp::launch {

/// A terminal without a screen: C and C++ libraries write each line at once to a terminal, while
/// they keep what goes to a pipe until their buffer is full, and lose it with the process.
struct PseudoTerminal {
  Fd read;   // the launcher's end; once all writers are gone, reading fails with EIO
  Fd write;  // the rank's end: bytes pass unchanged, nothing is echoed
};

/// Makes a pseudo-terminal whose ends no program started from here inherits.
///
/// \return nothing where the system has none left, or none at all.
std::optional<PseudoTerminal> make_pseudo_terminal();

/// The size of the terminal that `fd` is; nothing where it is none, or has no size.
std::optional<winsize> terminal_size(int fd);

/// Tells the programs on a pseudo-terminal how large it is.
void set_terminal_size(const Fd& fd, const winsize& size);

}  // namespace ddp::launch
