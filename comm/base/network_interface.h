#pragma once

#include <string>
#include <vector>

#include "base/environment.h"

namespace ddp {

/// Which of this host's interfaces Gloo listens on.
struct GlooDevices {
  std::vector<std::string> interfaces;  // names; when empty, `address` decides
  std::string address;                  // an IP address of this host
};

/// "10.0.0.1" or "interfaces eth0, eth1", for messages.
std::string to_string(const GlooDevices& devices);

/// The IPv4 addresses of this host's interfaces that are up; loopback_address() last.
std::vector<std::string> own_addresses();

/// Chooses the interfaces that Gloo listens on, for peers that reach rank 0 as `host`.
///
/// GLOO_SOCKET_IFNAME decides if set. Else: loopback_address() if `host` is empty (the store has no
/// host: the ranks share a process or a file) or a loopback address; else the address this host
/// would send from to reach `host`, which the kernel determines without sending a packet.
///
/// If a host's own name is a loopback address in its /etc/hosts, as Debian sets it up, the other
/// ranks would connect to themselves: then the host's first address that is not a loopback one.
///
/// \throws c10::ValueError  on an interface that does not exist, listing those that do; on a host
///         that cannot be resolved.
GlooDevices choose_gloo_devices(const Environment& environment, const std::string& host);

}  // namespace ddp
