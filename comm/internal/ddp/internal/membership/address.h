// Where a coordinator listens, for the launcher and the library, so without LibTorch.
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <utility>

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <ddp/internal/system/fd.h>

namespace ddp::membership {

/// "HOST:PORT/TOKEN", as ddprun writes it into DDP_COORDINATOR.
struct Address {
  std::string host;
  int port = 0;
  std::string token;
};

/// The other direction of parse_address().
inline std::string text_of(const Address& address) {
  const bool is_ipv6 = address.host.find(':') != std::string::npos;
  const auto host = is_ipv6 ? "[" + address.host + "]" : address.host;
  return host + ":" + std::to_string(address.port) + "/" + address.token;
}

/// \throws std::invalid_argument  with the text that an error shows.
inline Address parse_address(const std::string& text) {
  const auto slash = text.find('/');
  const auto colon = text.rfind(':', slash);
  Address address;
  if (slash != std::string::npos && colon != std::string::npos) {
    address.host = text.substr(0, colon);
    address.token = text.substr(slash + 1);
    const auto* end = text.data() + slash;
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, address.port);
    if (error != std::errc() || stop != end) address.port = 0;
  }
  if (address.host.size() > 1 && address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  const bool is_word = address.token.find_first_of(" \t\r\n/") == std::string::npos;
  if (address.host.empty() || address.port < 1 || address.port > 65535 || address.token.empty() ||
      !is_word) {
    throw std::invalid_argument("expected HOST:PORT/TOKEN, got '" + text + "'");
  }
  return address;
}

/// Connects within 2 seconds for each address of the host; empty when nothing listens there now, or
/// the name cannot be resolved.
inline Fd connect_to(const std::string& host, int port) {
  constexpr timeval kLimit = {2, 0};
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  Fd connected;
  for (const addrinfo* one = found; one != nullptr && !connected; one = one->ai_next) {
    Fd fd(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // Linux applies it to connect, too.
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kLimit, sizeof(kLimit));
    if (fd && ::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0) connected = std::move(fd);
  }
  ::freeaddrinfo(found);
  return connected;
}

}  // namespace ddp::membership
