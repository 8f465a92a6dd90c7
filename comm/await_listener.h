#pragma once

#include <chrono>
#include <string>

#include "deadline.h"

namespace ddp {

/// How long a host may be unknown. Container platforms make names known a little late, but a name
/// that is misspelt never is.
constexpr auto kUnknownHostPatience = std::chrono::seconds(30);

/// Waits until the host's name has an address, and says why not when the deadline has passed, or
/// when the name has been unknown for as long as `patience`.
///
/// \return  empty, or the last attempt's error: "Name or service not known".
std::string await_address(
    const std::string& host, const Deadline& deadline,
    std::chrono::milliseconds patience = kUnknownHostPatience);

/// Waits until something listens at host:port, and says why not when the deadline has passed.
///
/// TCPStore's own attempts may last twice its timeout and log a stack trace for each; after this
/// the first one succeeds.
///
/// \return  empty, or the last attempt's error: "Connection refused".
std::string await_listener(const std::string& host, int port, const Deadline& deadline);

}  // namespace ddp
