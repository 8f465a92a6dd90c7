// Lines over a connected socket, for the launcher and the library, so without LibTorch.
#pragma once

#include <cerrno>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <ddp/internal/membership/lines.h>
#include <ddp/internal/system/fd.h>

namespace ddp::membership {

/// Carries lines. Nothing here waits.
class LineChannel {
 public:
  LineChannel() = default;
  explicit LineChannel(Fd socket) : socket_(std::move(socket)) {
    const int on = 1;
    ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::fcntl(socket_.get(), F_SETFL, O_NONBLOCK);
  }

  /// Notices within 30 s that the peer's host is gone without closing the connection.
  inline void close_when_peer_is_lost();

  int fd() const { return socket_.get(); }
  explicit operator bool() const { return static_cast<bool>(socket_); }

  inline void send(std::string_view line);
  /// Closes it once all is sent, and reads no more.
  inline void close_after_sending();
  void close() { socket_.reset(); }
  bool all_sent() const { return unsent_.empty(); }
  /// Whether a line has come in part.
  bool has_begun_line() const { return !unread_.empty(); }
  /// This host's address on the way to the peer; "" where it is not known.
  inline std::string local_host() const;

  /// Sends what can be sent, and returns the lines that have come. Closes the socket when the peer
  /// did, or sends a line that is longer than a message may be.
  inline std::vector<std::string> exchange();

  inline void add_to(std::vector<pollfd>& waited) const;

 private:
  inline void write_ready();
  inline void read_ready();
  inline std::vector<std::string> take_lines();

  Fd socket_;
  bool closing_ = false;
  std::string unread_;
  std::string unsent_;
};

void LineChannel::close_when_peer_is_lost() {
  const auto set = [this](int level, int name, int value) {
    ::setsockopt(socket_.get(), level, name, &value, sizeof(value));
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
}

std::string LineChannel::local_host() const {
  constexpr std::string_view kMapped = "::ffff:";  // an IPv4 address of an IPv6 socket
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  auto* general = reinterpret_cast<sockaddr*>(&address);
  char host[NI_MAXHOST] = {};
  const bool is_known =
      ::getsockname(socket_.get(), general, &length) == 0 &&
      ::getnameinfo(general, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0;
  std::string text = is_known ? host : "";
  if (text.rfind(kMapped, 0) == 0) text.erase(0, kMapped.size());
  return text;
}

/// Takes a numeric address.
inline bool is_loopback_host(const std::string& host) {
  return host.rfind("127.", 0) == 0 || host == "::1";
}

void LineChannel::send(std::string_view line) {
  if (!socket_ || closing_) return;
  unsent_ += line;
  unsent_ += '\n';
  write_ready();
}

void LineChannel::close_after_sending() {
  closing_ = true;
  if (unsent_.empty()) close();
}

std::vector<std::string> LineChannel::exchange() {
  write_ready();
  if (closing_) return {};
  read_ready();
  return take_lines();
}

void LineChannel::write_ready() {
  while (socket_ && !unsent_.empty()) {
    const ssize_t count = ::send(socket_.get(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
    if (count > 0) {
      unsent_.erase(0, static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      // Lines that the peer sent before it closed can still be read.
      unsent_.clear();
    }
  }
  if (closing_ && unsent_.empty()) close();
}

void LineChannel::read_ready() {
  char buffer[4096];
  // More than the longest line is left to the kernel, which holds back a peer that sends too much.
  while (socket_ && unread_.size() <= kMaxLine) {
    const ssize_t count = ::recv(socket_.get(), buffer, sizeof(buffer), 0);
    if (count > 0) {
      unread_.append(buffer, static_cast<size_t>(count));
    } else if (count == 0) {
      close();
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno != EINTR) {
      close();
    }
  }
}

std::vector<std::string> LineChannel::take_lines() {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t end; (end = unread_.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(unread_.substr(begin, end - begin));
  }
  unread_.erase(0, begin);
  if (unread_.size() > kMaxLine) close();
  return lines;
}

void LineChannel::add_to(std::vector<pollfd>& waited) const {
  if (!socket_) return;
  const int events = (closing_ ? 0 : POLLIN) | (unsent_.empty() ? 0 : POLLOUT);
  waited.push_back({socket_.get(), static_cast<short>(events), 0});
}

}  // namespace ddp::membership
