#pragma once

#include <csignal>
#include <optional>
#include <string>

#include <ddp/internal/system/fd.h>

namespace ddp::launch {

/// As of a process that SIGTERM has ended; ranks that leave after a notice have it, too.
constexpr int kLeftCode = 128 + SIGTERM;

/// Returns the signals that ddprun waits for instead of dying from them: the signals that ask it to
/// end or that it only forwards, SIGWINCH and SIGCHLD. Leaves out the signals that stay ignored.
sigset_t awaited_signals();

/// Whether the caller ignores `signal` for the whole job: SIGHUP, by nohup, SIGUSR1 or SIGUSR2.
bool is_ignored_by_caller(int signal);

/// Whether ddprun only forwards `signal` to the ranks: SIGUSR1 and SIGUSR2, with which a scheduler
/// warns of its time limit.
bool is_only_forwarded(int signal);

/// Blocks `signals` and opens a non-blocking signalfd for them.
///
/// \throws std::system_error  when no descriptors are left.
Fd open_signals(const sigset_t& signals);

/// Takes the next signal from a non-blocking signalfd of awaited_signals(), if one has come.
std::optional<int> next_signal(int fd);

/// "SIGKILL" for 9; "signal 70" for one without a name.
std::string signal_name(int signal);

/// "exited with code 5", "was killed by signal 9 (SIGKILL)", for a wait status.
std::string describe_end(int status);

/// Returns the exit code that a shell reports for a wait status.
int exit_code_of(int status);

}  // namespace ddp::launch
