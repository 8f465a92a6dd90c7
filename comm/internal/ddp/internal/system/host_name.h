#pragma once

#include <unistd.h>

#include <string>

namespace ddp {

/// This host's name, or "localhost" where it has none. Two hosts may have the same.
inline std::string host_name() {
  char name[256] = {};
  const bool known = ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0';
  return known ? name : "localhost";
}

}  // namespace ddp
