#pragma once

#include <string>
#include <vector>

#include "launch/environment.h"
#include "launch/options.h"

namespace ddp::launch {

/// Makes a text one word of a POSIX shell: "a b" becomes 'a b'. Any bytes but NUL.
std::string quoted(const std::string& text);

/// Chooses the variables that the hosts' ddpruns and ranks get from this one: PATH,
/// LD_LIBRARY_PATH, OMP_NUM_THREADS, those of the libraries (DDP_*, TORCH_*, NCCL_*, GLOO_*), and
/// `more`, as NAME or NAME=VALUE. Leaves out those that name another job's place.
Environment passed_on(const Environment& all, const std::vector<std::string>& more);

/// The options, program and arguments of one host's ddprun.
///
/// \param port  of the endpoint; 0: node 0's ddprun takes a free one and prints it (`port_line`).
std::vector<std::string> host_arguments(const LaunchOptions& options, int node, int port);

/// The line for a host's shell, which becomes ddprun.
///
/// \param folder  in which it runs.
/// \param ddprun  its path.
std::string remote_command(
    const std::string& folder, const Environment& environment, const std::string& ddprun,
    const std::vector<std::string>& arguments);

/// The line by which node 0's ddprun names the port of its endpoint.
std::string port_line(int port);

/// \return the port of a line that port_line() made; 0: it is another line.
int port_of_line(const std::string& line);

}  // namespace ddp::launch
