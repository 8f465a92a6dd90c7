#include "launch/hosts/line_socket.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "launch/hosts/reserved_port.h"

namespace ddp::launch {
namespace {

constexpr size_t kMaxLine = 256;
constexpr int kBacklog = 128;
constexpr timeval kConnectLimit = {2, 0};

void set_option(const Fd& fd, int level, int name, int value) {
  ::setsockopt(fd.get(), level, name, &value, sizeof(value));
}

}  // namespace

LineSocket::LineSocket(Fd fd) : fd_(std::move(fd)) {
  set_option(fd_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(fd_, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd_, IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
}

void LineSocket::send_line(const std::string& line) const {
  const std::string bytes = line + "\n";
  if (fd_) (void)::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

std::optional<std::string> LineSocket::read_line(std::chrono::milliseconds timeout) const {
  std::string line;
  while (line.size() < kMaxLine) {
    pollfd waited = {fd_.get(), POLLIN, 0};
    char byte = 0;
    if (::poll(&waited, 1, static_cast<int>(timeout.count())) <= 0) return std::nullopt;
    if (::recv(fd_.get(), &byte, 1, 0) != 1) return std::nullopt;
    if (byte == '\n') return line;
    line += byte;
  }
  return std::nullopt;
}

LineSocket connect_to(const std::string& host, int port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  LineSocket connected;
  for (const addrinfo* one = found; one != nullptr && !connected; one = one->ai_next) {
    Fd fd(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    // Linux applies it to connect, too.
    ::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &kConnectLimit, sizeof(kConnectLimit));
    if (fd && ::connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0) {
      connected = LineSocket(std::move(fd));
    }
  }
  ::freeaddrinfo(found);
  return connected;
}

Fd listen_on(int port) {
  Fd fd = bind_to_port(port);
  if (fd && ::listen(fd.get(), kBacklog) == 0) return fd;
  throw std::system_error(
      errno, std::generic_category(), "cannot listen on port " + std::to_string(port));
}

}  // namespace ddp::launch
