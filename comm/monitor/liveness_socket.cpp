#include "monitor/liveness_socket.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

#include <ddp/internal/text.h>

#include "base/deadline.h"

namespace ddp {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

SocketAddress copy_of(const sockaddr* address, socklen_t length) {
  SocketAddress copy;
  std::memcpy(&copy.storage, address, length);
  copy.length = length;
  return copy;
}

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
    if (is_v4) return copy_of(entry->ifa_addr, sizeof(sockaddr_in));
    if (found.length == 0) found = copy_of(entry->ifa_addr, sizeof(sockaddr_in6));
  }
  return found;
}

// Parses numbers only, so that no name is looked up. Length 0 if they are malformed.
SocketAddress parse_address(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  return copy_of(found->ai_addr, static_cast<socklen_t>(found->ai_addrlen));
}

std::string to_text(const SocketAddress& address) {
  char host[NI_MAXHOST] = "";
  char port[NI_MAXSERV] = "";
  const int status = getnameinfo(
      address.get(), address.length, host, sizeof host, port, sizeof port,
      NI_NUMERICHOST | NI_NUMERICSERV);
  return status == 0 ? std::string(host) + ' ' + port : "";
}

int make_socket(int family) {
  return socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
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
  descriptor_ = make_socket(address.storage.ss_family);
  if (descriptor_ < 0) return;
  ForkClosedDescriptors::all().add(descriptor_);
  const bool listens =
      bind(descriptor_, address.get(), address.length) == 0 &&
      listen(descriptor_, SOMAXCONN) == 0 &&
      getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address.storage), &address.length) == 0;
  if (listens) address_ = to_text(address);
}

LivenessSocket::~LivenessSocket() {
  if (descriptor_ < 0 || !owner_.is_this_one()) return;
  ForkClosedDescriptors::all().remove(descriptor_);
  close(descriptor_);
}

void LivenessSocket::drain() const {
  while (descriptor_ >= 0) {
    const int connection = accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) return;
    close(connection);
  }
}

std::vector<Liveness> probe(
    const std::vector<std::string>& addresses, std::chrono::milliseconds at_most) {
  std::vector<Liveness> found(addresses.size(), Liveness::Unknown);
  std::vector<pollfd> waiting(addresses.size(), pollfd{-1, POLLOUT, 0});  // poll skips -1
  for (size_t i = 0; i < addresses.size(); ++i) {
    std::string host, port;
    if (!(InputText(addresses[i]) >> host >> port)) continue;
    const auto address = parse_address(host, port);
    if (address.length == 0) continue;
    const int fd = make_socket(address.storage.ss_family);
    if (fd < 0) continue;
    const int error = connect(fd, address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      waiting[i].fd = fd;
    } else {
      found[i] = liveness_of(error);
      close(fd);
    }
  }
  const Deadline deadline(at_most);
  const auto pending = [&] {
    return std::any_of(waiting.begin(), waiting.end(), [](const auto& w) { return w.fd >= 0; });
  };
  while (pending() && !deadline.passed()) {
    poll(waiting.data(), waiting.size(), static_cast<int>(deadline.left().count()));
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].fd < 0 || waiting[i].revents == 0) continue;
      int error = 0;
      socklen_t length = sizeof error;
      if (getsockopt(waiting[i].fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0) {
        found[i] = liveness_of(error);
      }
      close(waiting[i].fd);
      waiting[i].fd = -1;
    }
  }
  for (size_t i = 0; i < waiting.size(); ++i) {
    if (waiting[i].fd < 0) continue;
    found[i] = Liveness::Silent;
    close(waiting[i].fd);
  }
  return found;
}

}  // namespace ddp
