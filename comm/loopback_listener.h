#pragma once

#include <optional>
#include <string>

#include "owned_descriptor.h"

namespace ddp {

/// Binds a socket to a loopback address and listens, for a TCPStore to take over: c10d's own socket
/// listens on all addresses of the host, and whoever reaches it may read and write every key.
///
/// \param host  as the ranks know it. Only what is a loopback address by its spelling counts:
///         "localhost", 127.x.y.z, ::1. A host's own name may resolve to 127.0.1.1 on the host
///         itself, and to another address elsewhere.
/// \param port  1 to 65535.
/// \return  nothing where the host is no loopback address, or the port is not to be had: then
///         TCPStore's own attempt says why, or finds the store that this process has there already.
std::optional<OwnedDescriptor> listen_on_loopback(const std::string& host, int port);

}  // namespace ddp
