#pragma once

#include <csignal>
#include <string>

namespace ddp::launch {

/// The signals that ddprun waits for instead of dying from them: those that ask it to end, those
/// that it only passes on, SIGWINCH and SIGCHLD. Without those that stay ignored.
sigset_t awaited_signals();

/// Whether `signal` is one that a caller may have ignored for the whole job, and has: SIGHUP, by
/// nohup, and SIGUSR1 and SIGUSR2.
bool stays_ignored(int signal);

/// Whether `signal` is the ranks' own business: SIGUSR1 and SIGUSR2, with which a scheduler warns
/// of its time limit.
bool only_passed_on(int signal);

/// "SIGKILL" for 9; "signal 70" for one without a name.
std::string signal_name(int signal);

}  // namespace ddp::launch
