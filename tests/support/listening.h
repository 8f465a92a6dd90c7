// The addresses that sockets of this host listen on. Does not need LibTorch.
#pragma once

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace ddp::testing {

constexpr const char* kLoopback4 = "0100007F";
constexpr const char* kLoopback6 = "00000000000000000000000001000000";

/// In the spelling of /proc/net/tcp and tcp6.
inline std::set<std::string> addresses_listening_on(int port) {
  char suffix[8];
  std::snprintf(suffix, sizeof suffix, "%04X", static_cast<unsigned>(port));
  std::set<std::string> addresses;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(file);
    for (std::string line; std::getline(table, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state;
      fields >> number >> local >> remote >> state;
      const auto colon = local.find(':');
      constexpr const char* kListen = "0A";
      if (colon == std::string::npos || state != kListen) continue;
      if (local.substr(colon + 1) == suffix) addresses.insert(local.substr(0, colon));
    }
  }
  return addresses;
}

}  // namespace ddp::testing
