#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <random>
#include <stdexcept>

#include <ddp/internal/system/fd.h>

namespace ddp::testing {

/// A port of this host that another socket listens on while this object exists.
class TakenPort {
 public:
  TakenPort() {
    std::random_device random;
    // Below those that the kernel gives to connections, and to listeners that ask for any port: a
    // number that is free now is given to no other test's before its use.
    std::uniform_int_distribution<int> draw(16000, 31999);
    for (int tries = 0; tries < 1000; ++tries) {
      number_ = draw(random);
      socket_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (listens()) return;
    }
    throw std::runtime_error("cannot listen on a port");
  }

  int number() const { return number_; }

 private:
  bool listens() const {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(number_));
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    return ::bind(socket_.get(), generic, sizeof address) == 0 && ::listen(socket_.get(), 1) == 0;
  }

  Fd socket_;
  int number_ = 0;
};

/// A port that is free now.
inline int free_port() { return TakenPort().number(); }

}  // namespace ddp::testing
