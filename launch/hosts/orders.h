#pragma once

#include <string>
#include <vector>

namespace ddp::launch {

/// An order from the ddprun that started this one by -H.
struct Order {
  int signal = 0;  // take it as if it had come to this process; 0: another host has ended the job
};

std::string line_of(const Order& order);

/// Reads orders from standard input, a line each.
///
/// The input ends with the client that carries it, such as ssh, and with it the job of this host:
/// a remote shell without a terminal sends no SIGHUP.
class Orders {
 public:
  /// Where `fd` is a terminal, it neither echoes from here on, nor changes bytes either way.
  explicit Orders(int fd);

  /// Takes the orders that have come, without waiting.
  std::vector<Order> take();
  /// Whether the input has ended.
  bool ended() const { return ended_; }

 private:
  const int fd_;
  bool ended_ = false;
  std::string unread_;
};

}  // namespace ddp::launch
