#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <stdexcept>

#include <ddp/internal/fd.h>

namespace ddp::testing {

/// A port of this host that another socket listens on while this object exists.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const int fd = socket_.get();
    if (::bind(fd, generic, length) != 0 || ::listen(fd, 1) != 0 ||
        ::getsockname(fd, generic, &length) != 0) {
      throw std::runtime_error("cannot listen on a port");
    }
    number_ = ntohs(address.sin_port);
  }

  int number() const { return number_; }

 private:
  Fd socket_;
  int number_ = 0;
};

/// A port that is free now. Another program may take it before its use, which is rare.
inline int free_port() { return TakenPort().number(); }

}  // namespace ddp::testing
