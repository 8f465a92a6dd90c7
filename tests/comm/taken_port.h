#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Exception.h>

namespace ddp::testing {

/// A port of this host that another socket listens on while this object exists.
class TakenPort {
 public:
  TakenPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    TORCH_CHECK(
        bind(fd_, generic, length) == 0 && listen(fd_, 1) == 0 &&
            getsockname(fd_, generic, &length) == 0,
        "cannot listen on a port");
    number_ = ntohs(address.sin_port);
  }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  ~TakenPort() { close(fd_); }

  int number() const { return number_; }

 private:
  int fd_;
  int number_ = 0;
};

}  // namespace ddp::testing
