#include "rendezvous/wait_for_listener.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include <ddp/internal/system/host.h>

#include "base/executor.h"
#include "base/socket_address.h"

namespace ddp {
namespace {

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;
constexpr auto kBetweenAttempts = std::chrono::milliseconds(50);
constexpr auto kFirstPause = std::chrono::milliseconds(1);
// The least time for a lookup, for an attempt shortly before the deadline.
constexpr auto kLeastForLookup = std::chrono::milliseconds(500);

using Resolved = std::pair<Addresses, int>;

// Returns the host's addresses, or getaddrinfo's error. Bounded, because getaddrinfo blocks for
// longer than the deadline if name servers do not answer.
Resolved look_up(const std::string& host, int port, const Deadline& deadline) {
  auto result = bounded_call(
      [host, port]() -> Resolved {
        addrinfo hints{};
        hints.ai_socktype = SOCK_STREAM;
        addrinfo* found = nullptr;
        const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
        return {Addresses(status == 0 ? found : nullptr, freeaddrinfo), status};
      },
      Deadline::in(std::max(deadline.left(), kLeastForLookup)));
  return result ? std::move(*result) : Resolved{Addresses(nullptr, freeaddrinfo), EAI_AGAIN};
}

std::string in_numbers(const addrinfo& address) {
  char number[NI_MAXHOST] = "";
  ::getnameinfo(
      address.ai_addr, address.ai_addrlen, number, sizeof number, nullptr, 0, NI_NUMERICHOST);
  return number;
}

// Returns the error of the last of the host's addresses, or "" if one accepted the connection.
std::string try_host(
    const std::string& host, int port, const Deadline& deadline, std::string* number) {
  const auto [addresses, status] = look_up(host, port, deadline);
  if (status != 0) return gai_strerror(status);
  int error = 0;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const SocketAddress one(address->ai_addr, address->ai_addrlen);
    error = errors_of_connecting({one}, deadline.left()).front();
    if (error == 0 && number) *number = in_numbers(*address);
    if (error == 0) return "";
  }
  return std::strerror(error);
}

// Whether the next attempt may succeed although this one failed.
bool is_temporary(int status) { return status == EAI_AGAIN || status == EAI_SYSTEM; }

}  // namespace

std::string wait_for_address(
    const std::string& host, const Deadline& deadline, std::chrono::milliseconds at_most) {
  const Deadline unknown(at_most);
  for (;;) {
    const int status = look_up(host, 0, deadline).second;
    if (status == 0) return "";
    if (deadline.passed() || (unknown.passed() && !is_temporary(status)))
      return gai_strerror(status);
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

std::vector<std::string> addresses_elsewhere(const std::string& host, const Deadline& deadline) {
  const auto addresses = look_up(host, 0, deadline).first;
  std::vector<std::string> numbers;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (is_own_address(address->ai_addr, address->ai_addrlen)) return {};
    numbers.push_back(in_numbers(*address));
  }
  return numbers;
}

std::string own_address_in_numbers(const std::string& host, const Deadline& deadline) {
  if (host == "localhost") return loopback_address();
  const auto addresses = look_up(host, 0, deadline).first;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (is_own_address(address->ai_addr, address->ai_addrlen)) return in_numbers(*address);
  }
  return "";
}

std::string wait_for_listener(
    const std::string& host, int port, const Deadline& deadline, std::string* number) {
  // The first pauses are short: ranks that start together miss rank 0's listener by a moment.
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kBetweenAttempts)) {
    auto error = try_host(host, port, deadline, number);
    if (error.empty() || deadline.left() < pause) return error;
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace ddp
