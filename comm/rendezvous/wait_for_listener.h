#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace ddp {

/// How long a host's name may fail to resolve. Container platforms publish names a little late, but
/// a misspelt name never resolves.
constexpr auto kUnknownHostTimeout = std::chrono::seconds(30);

/// The same where an orchestrator starts rank 0's host when it has room, and names it then.
///
/// \param names_come_late  Environment's.
inline std::chrono::milliseconds unknown_host_timeout(
    bool names_come_late, const Deadline& deadline) {
  return names_come_late ? deadline.timeout() : kUnknownHostTimeout;
}

/// Waits until the host's name resolves to an address. Gives up when the deadline has passed, or
/// when the name has not resolved for as long as `at_most`.
///
/// \return  empty, or the last attempt's error: "Name or service not known".
std::string wait_for_address(
    const std::string& host, const Deadline& deadline,
    std::chrono::milliseconds at_most = kUnknownHostTimeout);

/// The host's addresses as numbers, if none of them is one of this machine's. Empty if one is, or
/// if the name does not resolve.
std::vector<std::string> addresses_elsewhere(const std::string& host, const Deadline& deadline);

/// Waits until something listens at host:port, or the deadline has passed.
///
/// Prevents failing attempts of TCPStore, which may last twice its timeout and log a stack trace
/// each: after this its first attempt succeeds.
///
/// \param number  if not null: set to the address of the host that it found the listener at, in
///         numbers.
/// \return  empty, or the last attempt's error: "Connection refused".
std::string wait_for_listener(
    const std::string& host, int port, const Deadline& deadline, std::string* number = nullptr);

/// The first of the host's addresses that this machine has, in numbers: where rank 0 reaches its
/// own listener. Of "localhost" the one that listen_on_loopback() takes, which need not be the
/// first. Empty if there is none.
std::string own_address_in_numbers(const std::string& host, const Deadline& deadline);

}  // namespace ddp
