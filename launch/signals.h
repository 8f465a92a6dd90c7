#pragma once

#include <csignal>
#include <string>

namespace ddp::launch {

/// The signals that ddprun waits for instead of dying from them: those that ask it to end, and
/// SIGCHLD. Without SIGHUP where that is ignored, so that nohup works.
sigset_t awaited_signals();

/// "SIGKILL" for 9; "signal 70" for one without a name.
std::string signal_name(int signal);

}  // namespace ddp::launch
