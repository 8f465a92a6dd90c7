#pragma once

#include <string>

#include <ddp/internal/system/fd.h>

namespace ddp {

/// Binds a socket to a loopback address and listens, for a TCPStore to use: c10d's own socket
/// listens on all addresses of the host, and any process that can connect to it can read and write
/// every key.
///
/// \param host  as the ranks spell it. Only a spelling of a loopback address counts: "localhost",
///         127.x.y.z, ::1. A host's own name may resolve to 127.0.1.1 on the host itself, and to
///         another address elsewhere.
/// \param port  1 to 65535.
/// \return  an empty one if the host is not a loopback address, or the port is taken: then
/// TCPStore's
///         own attempt reports why, or finds the store that this process already has there.
Fd listen_on_loopback(const std::string& host, int port);

}  // namespace ddp
