#include "launch/hosts/orders.h"

#include <cerrno>
#include <cstddef>
#include <optional>

#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr const char* kSignal = "signal ";
constexpr const char* kEnd = "end";
constexpr int kHighestSignal = 64;

std::optional<Order> order_of(const std::string& line) {
  const std::string signal = kSignal;
  if (line == kEnd) return Order{};
  if (line.rfind(signal, 0) != 0) return std::nullopt;
  const auto number = number_in(line.substr(signal.size()), 1, kHighestSignal);
  return number ? std::optional<Order>(Order{*number}) : std::nullopt;
}

}  // namespace

std::string line_of(const Order& order) {
  return (order.signal == 0 ? kEnd : kSignal + std::to_string(order.signal)) + "\n";
}

Orders::Orders(int fd) : fd_(fd) {
  termios attributes{};
  if (::tcgetattr(fd_, &attributes) != 0) return;
  ::cfmakeraw(&attributes);
  ::tcsetattr(fd_, TCSANOW, &attributes);
}

std::vector<Order> Orders::take() {
  std::vector<Order> orders;
  // Not a non-blocking descriptor: it may be that of the process which started ddprun, too.
  pollfd ready = {fd_, POLLIN, 0};
  while (!ended_ && ::poll(&ready, 1, 0) > 0) {
    char buffer[512];
    const ssize_t count = ::read(fd_, buffer, sizeof(buffer));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) break;
    ended_ = count <= 0;
    if (count > 0) unread_.append(buffer, static_cast<size_t>(count));
  }
  const auto end = unread_.rfind('\n');
  if (end == std::string::npos) return orders;
  for (const auto& line : split(unread_.substr(0, end), '\n')) {
    if (const auto order = order_of(line)) orders.push_back(*order);
  }
  unread_.erase(0, end + 1);
  return orders;
}

}  // namespace ddp::launch
