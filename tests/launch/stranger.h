// A client of a coordinator that is no launcher and no member.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <poll.h>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/membership/line_channel.h>

namespace ddp::testing {

/// The first line that a coordinator answers to `line`; "": it closed the connection without one,
/// or answered none in 20 seconds. Nothing: it does not listen.
inline std::optional<std::string> answer_to_stranger(int port, const std::string& line) {
  membership::LineChannel channel(membership::connect_to("127.0.0.1", port));
  if (!channel) return std::nullopt;
  channel.send(line);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (channel && std::chrono::steady_clock::now() < deadline) {
    pollfd waited = {channel.fd(), POLLIN, 0};
    ::poll(&waited, 1, /*timeout=*/1000);
    const auto lines = channel.exchange();
    if (!lines.empty()) return lines.front();
  }
  return "";
}

}  // namespace ddp::testing
