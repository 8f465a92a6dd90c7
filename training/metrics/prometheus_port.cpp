#include "metrics/prometheus_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ddp/internal/system/fd.h>
#include <ddp/internal/system/start_thread.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using PortClock = std::chrono::steady_clock;

constexpr size_t kMostRequestBytes = 8192;
// After an accept() that failed: the kernel would wake the thread at once, again and again.
constexpr std::chrono::milliseconds kPauseOfListening(100);

std::string http_text(
    const char* status, const std::string& body, const char* type = "text/plain; charset=utf-8") {
  return ddp::str(
      "HTTP/1.1 ", status, "\r\nContent-Type: ", type, "\r\nContent-Length: ", body.size(),
      "\r\nConnection: close\r\n\r\n", body);
}

[[noreturn]] void throw_port_error(int port, int error) {
  throw std::runtime_error(ddp::str(
      "MetricsOptions::prometheus: expected to listen on port ", port, " of 127.0.0.1, got \"",
      std::strerror(error), "\". Choose another port; 0 takes any that is free."));
}

Fd listen_on_port(int port) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;  // else the connections of a program that has ended hold its port for a minute
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const bool listens =
      socket && ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0 &&
      ::bind(socket.get(), generic, sizeof address) == 0 &&
      ::listen(socket.get(), PrometheusPort::kMostConnections) == 0;
  if (!listens) throw_port_error(port, errno);
  return socket;
}

int port_of(const Fd& socket) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin_port);
}

}  // namespace

/// A client that has connected. It sends a request, and then gets the answer.
struct PrometheusConnection {
  Fd socket;
  PortClock::time_point until;
  std::string request = {};
  std::string answer = {};
  size_t sent = 0;

  bool is_answered() const { return !answer.empty(); }

  /// \return  whether more of the request may come.
  bool read_request(const std::string& metrics) {
    std::array<char, 1024> block{};
    const ssize_t count = ::recv(socket.get(), block.data(), block.size(), 0);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    if (count == 0) return false;
    request.append(block.data(), static_cast<size_t>(count));
    answer = http_answer(request, metrics);
    return true;
  }

  /// \return  whether more of the answer has to be sent.
  bool send_answer() {
    const ssize_t count =
        ::send(socket.get(), answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    sent += static_cast<size_t>(count);
    return sent < answer.size();
  }
};

struct PrometheusPort::State {
  Fd listener;
  Fd wake;  // becomes readable at the end
  std::chrono::milliseconds patience{0};
  std::vector<PrometheusConnection> connections = {};  // belong to the thread
  PortClock::time_point listens_again = {};            // belongs to the thread
  std::mutex mutex = {};                               // guards `text`
  std::string text = {};

  void run();
  std::vector<pollfd> awaited(PortClock::time_point now) const;
  int wait_ms(PortClock::time_point now) const;
  void accept_one(PortClock::time_point now);
  bool serve(PrometheusConnection& connection);
};

// The thread waits for the end, for a connection if it may have one more, and for those it has.
std::vector<pollfd> PrometheusPort::State::awaited(PortClock::time_point now) const {
  const bool accepts = connections.size() < kMostConnections && now >= listens_again;
  std::vector<pollfd> fds{{wake.get(), POLLIN, 0}, {accepts ? listener.get() : -1, POLLIN, 0}};
  for (const auto& connection : connections) {
    const short events = connection.is_answered() ? POLLOUT : POLLIN;
    fds.push_back({connection.socket.get(), events, 0});
  }
  return fds;
}

int PrometheusPort::State::wait_ms(PortClock::time_point now) const {
  auto first = PortClock::time_point::max();
  for (const auto& connection : connections) first = std::min(first, connection.until);
  if (listens_again > now) first = std::min(first, listens_again);
  if (first == PortClock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(first - now).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

void PrometheusPort::State::accept_one(PortClock::time_point now) {
  Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) {
    connections.push_back({std::move(socket), now + patience});
  } else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    listens_again = now + kPauseOfListening;  // no more file descriptors, for example
  }
}

bool PrometheusPort::State::serve(PrometheusConnection& connection) {
  if (!connection.is_answered()) {
    const std::lock_guard lock(mutex);
    if (!connection.read_request(text)) return false;
    if (!connection.is_answered()) return true;
  }
  return connection.send_answer();
}

void PrometheusPort::State::run() {
  while (true) {
    auto now = PortClock::now();
    auto fds = awaited(now);
    if (::poll(fds.data(), fds.size(), wait_ms(now)) < 0 && errno != EINTR) return;
    if (fds[0].revents != 0) return;
    now = PortClock::now();
    std::vector<PrometheusConnection> remaining;
    for (size_t i = 0; i < connections.size(); ++i) {
      auto& connection = connections[i];
      const bool is_ready = fds[i + 2].revents != 0;
      const bool goes_on = is_ready ? serve(connection) : true;
      if (goes_on && now < connection.until) remaining.push_back(std::move(connection));
    }
    connections = std::move(remaining);
    if (fds[1].revents != 0) accept_one(now);
  }
}

PrometheusPort::PrometheusPort(int port, int patience_ms) {
  Fd wake(::eventfd(0, EFD_CLOEXEC));
  if (!wake) throw_port_error(port, errno);
  state_.reset(new State{listen_on_port(port), std::move(wake)});
  state_->patience = std::chrono::milliseconds(patience_ms);
  port_ = port_of(state_->listener);
  thread_ = start_thread([state = state_.get()] { state->run(); });
}

PrometheusPort::~PrometheusPort() {
  const uint64_t one = 1;
  while (::write(state_->wake.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

void PrometheusPort::publish(std::string text) {
  const std::lock_guard lock(state_->mutex);
  state_->text = std::move(text);
}

std::string http_answer(const std::string& request, const std::string& metrics) {
  const auto end = request.find("\r\n\r\n");
  if (end == std::string::npos) {
    if (request.size() < kMostRequestBytes) return "";
    return http_text("431 Request Header Fields Too Large", "");
  }
  const auto line = request.substr(0, request.find("\r\n"));
  const auto space = line.find(' ');
  const auto target_end = line.find(' ', space + 1);
  if (space == std::string::npos || target_end == std::string::npos ||
      line.compare(target_end + 1, 5, "HTTP/") != 0) {
    return http_text("400 Bad Request", "");
  }
  const auto method = line.substr(0, space);
  auto target = line.substr(space + 1, target_end - space - 1);
  target = target.substr(0, target.find('?'));
  if (target != "/metrics") return http_text("404 Not Found", "GET /metrics\n");
  if (method != "GET") return http_text("405 Method Not Allowed", "GET /metrics\n");
  return http_text("200 OK", metrics, "text/plain; version=0.0.4; charset=utf-8");
}

}  // namespace ddp
