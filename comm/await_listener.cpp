#include "await_listener.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

namespace ddp {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kBetweenAttempts = std::chrono::milliseconds(50);

std::string text_of(int error) { return std::strerror(error); }

// A connection that is closed at once; the error, or "".
std::string try_address(const addrinfo& address, std::chrono::milliseconds timeout) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return text_of(errno);
  int error = connect(fd, address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    const bool answered = poll(&waiting, 1, static_cast<int>(timeout.count())) > 0;
    socklen_t length = sizeof error;
    if (!answered || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = ETIMEDOUT;
  }
  close(fd);
  return error == 0 ? "" : text_of(error);
}

// The error of the last of the host's addresses, or "" when one of them took the connection.
std::string try_host(const std::string& host, int port, Clock::time_point deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) return gai_strerror(status);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, freeaddrinfo);
  std::string error;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    error = try_address(*address, std::max(left, std::chrono::milliseconds(0)));
    if (error.empty()) break;
  }
  return error;
}

}  // namespace

std::string await_listener(const std::string& host, int port, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    auto error = try_host(host, port, deadline);
    if (error.empty() || Clock::now() + kBetweenAttempts > deadline) return error;
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

}  // namespace ddp
