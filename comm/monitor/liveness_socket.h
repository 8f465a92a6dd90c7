#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ddp/internal/owner_process.h>
#include <ddp/internal/system/fd.h>

#include "base/network_interface.h"

namespace ddp {

/// A socket that listens for as long as this object lives. The kernel completes a peer's connection
/// without any thread of this process, so a connection shows whether this object still exists: it
/// exists in a process that computes or is stopped, but not in one that ended. A process that this
/// one forks does not keep it alive.
class LivenessSocket {
 public:
  /// Listens on the interface or address that the group's other sockets use.
  explicit LivenessSocket(const GlooDevices& devices);
  ~LivenessSocket();
  LivenessSocket(const LivenessSocket&) = delete;
  LivenessSocket& operator=(const LivenessSocket&) = delete;

  /// "10.0.0.1 40000", for `probe`; "" if the system refused a socket.
  const std::string& address() const { return address_; }

  /// Closes the connections of peers that have probed.
  void drain() const;

 private:
  const OwnerProcess owner_;
  Fd socket_;
  std::string address_;
};

enum class Liveness {
  Alive,
  Gone,     // its host refuses the connection: nothing listens
  Silent,   // no answer: its host is down, or the network to it
  Unknown,  // no usable address, or another error
};

/// Connects to each LivenessSocket at `addresses`, all at the same time.
std::vector<Liveness> probe(
    const std::vector<std::string>& addresses, std::chrono::milliseconds at_most);

}  // namespace ddp
