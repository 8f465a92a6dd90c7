#pragma once

#include <optional>
#include <string>

#include "base/environment.h"

namespace ddp {

struct InitMethod {
  enum class Kind { kEnv, kTcp, kFile, kMpi };
  Kind kind = Kind::kEnv;
  std::string host;                   // kTcp; without brackets when it is an IPv6 address
  int port = 0;                       // kTcp
  std::string path;                   // kFile, absolute
  std::optional<Setting> rank;        // "?rank=R"
  std::optional<Setting> world_size;  // "&world_size=W"
};

/// Parses "env://", "tcp://host:port", "file:///path" or "mpi://", the first three with an optional
/// query.
///
/// \throws c10::ValueError  naming what is wrong with the URL, and the valid forms.
InitMethod parse_init_method(const std::string& url);

}  // namespace ddp
