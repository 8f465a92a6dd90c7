#pragma once

#include <string>
#include <vector>

#include "environment.h"

namespace ddp {

/// Which of this host's interfaces Gloo listens on.
struct GlooDevices {
  std::vector<std::string> interfaces;  // names; when empty, `address` decides
  std::string address;                  // an IP address of this host
};

/// "10.0.0.1" or "interfaces eth0, eth1", for messages.
std::string to_string(const GlooDevices& devices);

/// The interfaces that Gloo shall listen on, for peers that know rank 0 as `host`.
///
/// GLOO_SOCKET_IFNAME decides if set. Else: 127.0.0.1 when `host` is empty (the store says nothing
/// of hosts: the ranks share a process or a file) or a loopback address; else the address this host
/// would send from to reach `host`, which the kernel tells without a packet sent.
///
/// A host whose own name is a loopback address in its /etc/hosts, as Debian sets it up, would tell
/// the others to connect to themselves: there, the first address of the host that is none.
///
/// \throws c10::ValueError  on an interface that does not exist, listing those that do; on a host
///         that cannot be resolved.
GlooDevices choose_gloo_devices(const Environment& environment, const std::string& host);

}  // namespace ddp
