#pragma once

#include <chrono>
#include <string>

namespace ddp {

/// Waits until something listens at host:port, and says why not when the timeout has passed.
///
/// TCPStore's own attempts may last twice its timeout and log a stack trace for each; after this
/// the first one succeeds.
///
/// \return  empty, or the last attempt's error: "Connection refused".
std::string await_listener(const std::string& host, int port, std::chrono::milliseconds timeout);

}  // namespace ddp
