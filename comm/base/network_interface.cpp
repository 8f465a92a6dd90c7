#include "base/network_interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/system/fd.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

#include "base/socket_address.h"

namespace ddp {
namespace {

template <typename T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

Owned<ifaddrs> interfaces() {
  ifaddrs* list = nullptr;
  const int error = getifaddrs(&list) == 0 ? 0 : errno;
  DDP_CHECK(
      error == 0,
      "Gloo: expected to list this host's network interfaces, but cannot: ", std::strerror(error),
      ". Set GLOO_SOCKET_IFNAME to the one that leads to the other ranks.");
  return {list, freeifaddrs};
}

std::string address_text(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  if (getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

// Returns the address that this host would send from to reach `peer`: connecting a datagram socket
// consults the routing table and sends nothing. Empty if there is no route.
std::string local_address_towards(const addrinfo& peer) {
  const Fd socket(::socket(peer.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  auto* address = reinterpret_cast<sockaddr*>(&local);
  const bool found = socket && ::connect(socket.get(), peer.ai_addr, peer.ai_addrlen) == 0 &&
                     ::getsockname(socket.get(), address, &length) == 0;
  return found ? address_text(address, length) : "";
}

std::string first_non_loopback_address() { return own_addresses().front(); }

// Whether the user wrote a loopback address, not a name that only this host resolves to one.
bool is_loopback_name(const std::string& host) {
  in6_addr v6{};
  in_addr v4{};
  return host == "localhost" || (inet_pton(AF_INET, host.c_str(), &v4) == 1) ||
         (inet_pton(AF_INET6, host.c_str(), &v6) == 1);
}

std::string address_towards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), "9", &hints, &found);
  DDP_CHECK_VALUE(
      status == 0, "Gloo: expected rank 0's host to have an address, got \"", host,
      "\": ", gai_strerror(status), ". Check MASTER_ADDR (or the host in tcp://).");
  const Owned<addrinfo> addresses(found, freeaddrinfo);
  std::string local;
  for (const auto* peer = addresses.get(); peer != nullptr && local.empty(); peer = peer->ai_next) {
    if (!is_loopback(peer->ai_addr)) {
      local = local_address_towards(*peer);
    } else {
      local = is_loopback_name(host) ? address_text(peer->ai_addr, peer->ai_addrlen)
                                     : first_non_loopback_address();
    }
  }
  DDP_CHECK(
      !local.empty(), "Gloo: expected a route from this host to \"", host,
      "\", found none. Set GLOO_SOCKET_IFNAME to the interface that leads to the other ranks.");
  return local;
}

std::string names_of_interfaces() {
  std::vector<std::string> names;
  const auto list = interfaces();
  for (const auto* entry = list.get(); entry != nullptr; entry = entry->ifa_next) {
    const std::string name = entry->ifa_name;
    if (!contains(names, name)) names.push_back(name);
  }
  return joined_by(", ", names);
}

std::vector<std::string> parse_interfaces(const Setting& setting) {
  std::vector<std::string> names;
  InputText list(setting.value);
  for (std::string name; std::getline(list, name, ',');) {
    DDP_CHECK_VALUE(
        if_nametoindex(name.c_str()) != 0, setting.name,
        ": expected interfaces of this host, got \"", name, "\". There are ", names_of_interfaces(),
        ": set it to those that lead to the other ranks, or unset it.");
    names.push_back(name);
  }
  return names;
}

}  // namespace

std::string to_string(const GlooDevices& devices) {
  return devices.interfaces.empty() ? devices.address
                                    : "interfaces " + joined_by(", ", devices.interfaces);
}

GlooDevices choose_gloo_devices(const Environment& environment, const std::string& host) {
  if (environment.gloo_interfaces) return {parse_interfaces(*environment.gloo_interfaces), ""};
  return {{}, host.empty() ? loopback_address() : address_towards(host)};
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  const auto list = interfaces();
  for (const auto* entry = list.get(); entry != nullptr; entry = entry->ifa_next) {
    // An interface without a carrier, as docker0 without containers, is up, but does not run.
    constexpr unsigned kWorks = IFF_UP | IFF_RUNNING;
    const bool usable = entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET &&
                        (entry->ifa_flags & kWorks) == kWorks && !is_loopback(entry->ifa_addr);
    if (usable) addresses.push_back(address_text(entry->ifa_addr, sizeof(sockaddr_in)));
  }
  addresses.push_back(loopback_address());
  return addresses;
}

}  // namespace ddp
