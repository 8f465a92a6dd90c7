#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <ddp/internal/owner_process.h>

#include "interface.h"

namespace ddp {

/// A socket that listens for as long as this object lives. The kernel completes a peer's connection
/// without any thread of this process, so a connection tells whether this object still exists: it
/// does in a process that computes or is stopped, and does not in one that ended. A process that
/// this one forks does not keep it alive.
class PresenceSocket {
 public:
  /// Listens on the interface or address that the group's other sockets use.
  explicit PresenceSocket(const GlooDevices& devices);
  ~PresenceSocket();
  PresenceSocket(const PresenceSocket&) = delete;
  PresenceSocket& operator=(const PresenceSocket&) = delete;

  /// "10.0.0.1 40000", for `probe`; "" where the system refused a socket.
  const std::string& address() const { return address_; }

  /// Forgets the connections of those who probed.
  void drain() const;

 private:
  const OwnerProcess owner_;
  int descriptor_ = -1;
  std::string address_;
};

enum class Presence {
  Present,
  Gone,     // its host answers, and nobody listens
  Silent,   // nothing answers there: its host is down, or the network to it
  Unknown,  // an address that says nothing
};

/// Connects to each PresenceSocket at `addresses`, all at the same time.
std::vector<Presence> probe(
    const std::vector<std::string>& addresses, std::chrono::milliseconds at_most);

}  // namespace ddp
