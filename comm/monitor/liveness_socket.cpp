#include "monitor/liveness_socket.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <set>

#include <ddp/internal/text.h>

#include "base/socket_address.h"

namespace ddp {
namespace {

// Whether other hosts can use the address: a link-local one refers to another interface there.
bool is_usable(const sockaddr* address) {
  if (address->sa_family == AF_INET) return true;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return address->sa_family == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
}

// Prefers IPv4 to IPv6. Length 0 for an interface without an internet address.
SocketAddress address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(list, freeifaddrs);
  SocketAddress found;
  for (const auto* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || name != entry->ifa_name || !is_usable(entry->ifa_addr)) {
      continue;
    }
    const bool is_v4 = entry->ifa_addr->sa_family == AF_INET;
    if (is_v4) return {entry->ifa_addr, sizeof(sockaddr_in)};
    if (found.length == 0) found = {entry->ifa_addr, sizeof(sockaddr_in6)};
  }
  return found;
}

std::string address_text(const SocketAddress& address) {
  char host[NI_MAXHOST] = "";
  char port[NI_MAXSERV] = "";
  const int status = getnameinfo(
      address.get(), address.length, host, sizeof host, port, sizeof port,
      NI_NUMERICHOST | NI_NUMERICSERV);
  return status == 0 ? std::string(host) + ' ' + port : "";
}

Liveness liveness_of(int error) {
  if (error == 0) return Liveness::Alive;
  const bool is_refused = error == ECONNREFUSED;
  const bool is_unreachable = error == EHOSTUNREACH || error == ENETUNREACH || error == ETIMEDOUT;
  return is_refused ? Liveness::Gone : is_unreachable ? Liveness::Silent : Liveness::Unknown;
}

// Closes the sockets in forked processes, which have a copy of each descriptor: otherwise a socket
// would still listen after its owner's end.
class ForkClosedDescriptors {
 public:
  static ForkClosedDescriptors& all() {
    static auto* descriptors =
        new ForkClosedDescriptors;  // never destroyed: a fork may happen at any time
    return *descriptors;
  }
  void add(int descriptor) {
    const std::lock_guard lock(mutex_);
    open_.insert(descriptor);
  }
  void remove(int descriptor) {
    const std::lock_guard lock(mutex_);
    open_.erase(descriptor);
  }

 private:
  ForkClosedDescriptors() {
    pthread_atfork(
        [] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
        [] {
          for (const int descriptor : all().open_) close(descriptor);
          all().open_.clear();
          all().mutex_.unlock();
        });
  }

  std::mutex mutex_;
  std::set<int> open_;
};

}  // namespace

LivenessSocket::LivenessSocket(const GlooDevices& devices) {
  auto address = devices.interfaces.empty() ? parse_address(devices.address, "0")
                                            : address_of_interface(devices.interfaces.front());
  if (address.length == 0) return;
  socket_ = Fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket_) return;
  const int fd = socket_.get();
  ForkClosedDescriptors::all().add(fd);
  const bool listens =
      ::bind(fd, address.get(), address.length) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) == 0;
  if (listens) address_ = address_text(address);
}

LivenessSocket::~LivenessSocket() {
  if (!owner_.is_this_one()) {
    socket_.release();  // the fork has closed it
  } else if (socket_) {
    ForkClosedDescriptors::all().remove(socket_.get());
  }
}

void LivenessSocket::drain() const {
  while (Fd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC))) {
  }
}

std::vector<Liveness> probe(
    const std::vector<std::string>& addresses, std::chrono::milliseconds at_most) {
  std::vector<SocketAddress> parsed;
  for (const auto& address : addresses) {
    std::string host, port;
    const bool is_whole = bool(InputText(address) >> host >> port);
    parsed.push_back(is_whole ? parse_address(host, port) : SocketAddress());
  }
  std::vector<Liveness> found;
  for (const int error : errors_of_connecting(parsed, at_most)) found.push_back(liveness_of(error));
  return found;
}

}  // namespace ddp
