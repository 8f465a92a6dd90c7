#include "generations/meeting.h"

#include <sys/socket.h>

#include <utility>

#include <netinet/in.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "rendezvous/loopback_listener.h"

namespace ddp {
namespace {

struct Outcome {
  bool is_there = false;
  ProcessGroup group;
  std::exception_ptr error;
};

uint16_t port_of(int socket) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  const auto port = address.ss_family == AF_INET6
                        ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                        : reinterpret_cast<const sockaddr_in&>(address).sin_port;
  return ntohs(port);
}

}  // namespace

void Meeting::wake() {
  { const std::lock_guard lock(state_->mutex); }
  state_->changed.notify_all();
}

ProcessGroup Meeting::run(Make make, const std::function<bool()>& is_cancelled) {
  const auto outcome = std::make_shared<Outcome>();
  Executor executor;
  executor.push([state = state_, outcome, make = std::move(make)] {
    Outcome made;
    try {
      made.group = make();
    } catch (...) {
      made.error = std::current_exception();
    }
    {
      const std::lock_guard lock(state->mutex);
      made.is_there = true;
      std::swap(*outcome, made);
    }
    state->changed.notify_all();
  });
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return is_cancelled() || outcome->is_there; });
  if (!outcome->is_there) {
    lock.unlock();
    executor.close(Deadline::Milliseconds(0));
    return {};
  }
  if (outcome->error) std::rethrow_exception(outcome->error);
  return std::move(outcome->group);
}

c10::intrusive_ptr<c10d::Store> open_generation_store(
    const std::string& host, std::chrono::milliseconds timeout, std::string& address) {
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.port = 0;  // any: TCPStore's default may be that of the generation before
  auto listener = listen_on_loopback(host, 0);
  if (listener) {
    options.port = port_of(listener.get());
    options.masterListenFd = listener.release();
  }
  auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
  const bool is_ipv6 = host.find(':') != std::string::npos;
  address = (is_ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(store->getPort());
  return store;
}

}  // namespace ddp
