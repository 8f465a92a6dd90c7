#pragma once

#include <string>

namespace ddp::launch {

/// "exited with code 5", "was killed by signal 9 (SIGKILL)", for a wait status.
std::string describe_end(int status);

/// Returns the exit code that a shell reports for a wait status.
int exit_code_of(int status);

}  // namespace ddp::launch
