#pragma once

#include <string>
#include <vector>

namespace ddp::launch {

/// A host of -H or --hostfile.
struct Host {
  std::string name;  // as ssh takes it: an address, a name, USER@NAME
  int ranks = 0;     // 0: not given
};

/// Reads -H's "a:4,b:4,[::1]:2,c". A host that is there twice is one host with the ranks of both.
///
/// \throws std::invalid_argument  with the rule and the part that breaks it.
std::vector<Host> hosts_of_list(const std::string& list);

/// Reads a hostfile's lines: "host slots=4", "host:4" or "host"; # begins a comment. Open MPI's
/// other words ("max_slots=8") are passed over.
///
/// \throws std::invalid_argument  with the rule and the line that breaks it.
std::vector<Host> hosts_of_file(const std::string& text);

/// Gives each host its ranks.
///
/// \param by_default  ranks of a host that names none; 0: not given, so 1.
/// \param all  ranks of the job, which fill the hosts in their order; 0: as many as there are.
/// \return the hosts that have any.
/// \throws std::invalid_argument  when the hosts have fewer than `all`, or have numbers beside
///         `by_default`.
std::vector<Host> with_ranks(std::vector<Host> hosts, int by_default, int all);

/// The address by which the hosts reach the first of them: its name without "user@". A name that
/// each host has for itself, such as localhost, is this host, and the others get its own name.
///
/// \param names  of all hosts.
/// \param own_name  this host's.
/// \throws std::invalid_argument  when that is of no use to the others, either.
std::string address_of_first(const std::vector<std::string>& names, const std::string& own_name);

}  // namespace ddp::launch
