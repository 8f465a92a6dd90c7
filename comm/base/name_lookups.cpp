#include "base/name_lookups.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <resolv.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <exception>
#include <thread>

#include <ddp/internal/check.h>
#include <ddp/internal/system/fd.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp {
namespace {

/// A name server on a loopback port, which says of each name that it does not exist.
///
/// Without any server a look-up would end at once, too, but as one that may be tried again, of
/// which c10d prints a warning.
class EmptyNameServer {
 public:
  EmptyNameServer() {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socket_ = Fd(::socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    end_ = Fd(::eventfd(0, EFD_CLOEXEC));
    auto* address = reinterpret_cast<sockaddr*>(&address_);
    socklen_t length = sizeof address_;
    const bool can_serve = socket_ && end_ && ::bind(socket_.get(), address, length) == 0 &&
                           ::getsockname(socket_.get(), address, &length) == 0;
    if (can_serve) thread_ = start_thread([this] { serve(); });
  }
  ~EmptyNameServer() {
    if (!thread_.joinable()) return;
    while (::eventfd_write(end_.get(), 1) != 0 && errno == EINTR) {
    }
    thread_.join();
  }
  EmptyNameServer(const EmptyNameServer&) = delete;
  EmptyNameServer& operator=(const EmptyNameServer&) = delete;

  /// Has the calling thread ask this server only. The thread must end before the server, for its
  /// resolver keeps the address.
  void use_on_this_thread() const {
    if (!thread_.joinable() || res_init() != 0) return;
    _res.nsaddr_list[0] = address_;
    _res.nscount = 1;
    _res.retrans = 1;  // seconds
    _res.retry = 1;
  }

  /// To be called without threads that use the server.
  int answered() const { return answered_; }

 private:
  void serve() {
    std::array<pollfd, 2> waiting{{{socket_.get(), POLLIN, 0}, {end_.get(), POLLIN, 0}}};
    while (waiting[1].revents == 0) {
      if (waiting[0].revents != 0) answer();
      if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return;
    }
  }

  /// Returns the question, marked as the answer that the name does not exist (RFC 1035, 4.1.1).
  void answer() {
    std::array<unsigned char, 512> message{};
    sockaddr_storage from{};
    auto* sender = reinterpret_cast<sockaddr*>(&from);
    socklen_t length = sizeof from;
    constexpr ssize_t kHeader = 12;
    const auto bytes =
        ::recvfrom(socket_.get(), message.data(), message.size(), 0, sender, &length);
    if (bytes < kHeader) return;
    constexpr unsigned kIsAnswer = 0x80;
    constexpr unsigned kNoSuchName = 3;
    message[2] = static_cast<unsigned char>(message[2] | kIsAnswer);
    message[3] = static_cast<unsigned char>((message[3] & ~0xfU) | kNoSuchName);
    ++answered_;
    (void)::sendto(socket_.get(), message.data(), static_cast<size_t>(bytes), 0, sender, length);
  }

  Fd socket_;
  Fd end_;
  sockaddr_in address_{};
  int answered_ = 0;
  std::thread thread_;
};

}  // namespace

int without_name_lookups(const std::function<void()>& call) {
  const EmptyNameServer server;
  std::exception_ptr error;
  start_thread([&] {
    server.use_on_this_thread();
    error = exception_of(call);
  }).join();
  if (error) std::rethrow_exception(error);
  return server.answered();
}

}  // namespace ddp
