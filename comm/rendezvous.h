#pragma once

#include <string>

#include <ddp/process_group.h>

#include "environment.h"

namespace ddp {

/// An init_method, taken apart.
struct InitMethod {
  enum class Kind { kEnv, kTcp, kFile };
  Kind kind = Kind::kEnv;
  std::string host;         // kTcp; without brackets when it is an IPv6 address
  int port = 0;             // kTcp
  std::string path;         // kFile, absolute
  std::optional<Setting> rank;        // "?rank=R"
  std::optional<Setting> world_size;  // "&world_size=W"
};

/// Takes "env://", "tcp://host:port" or "file:///path" apart, each with an optional query.
///
/// \throws c10::ValueError  naming what is wrong with the URL, and the forms there are.
InitMethod parse_init_method(const std::string& url);

/// Where the ranks meet and which one this is.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  /// Rank 0's host, as the others know it. Empty when the store says nothing of hosts.
  std::string host;
};

/// Finds rank, world size and a store that reaches all ranks. Does not wait for them.
///
/// \throws c10::ValueError  on a missing or malformed setting, naming it, its value and the remedy.
/// \throws c10::Error  when the port is taken or rank 0 does not answer within the timeout.
Rendezvous rendezvous(const ProcessGroupOptions& options, const Environment& environment);

/// The setting's value as a whole number.
///
/// \throws c10::ValueError  when it is none, or not in [min, max].
int parse_int(const Setting& setting, int min, int max);

}  // namespace ddp
