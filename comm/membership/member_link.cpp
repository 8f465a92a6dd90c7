#include "membership/member_link.h"

#include <algorithm>
#include <csignal>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ddp/internal/system/host.h>
#include <ddp/internal/system/start_thread.h>

namespace ddp::membership {
namespace {

constexpr Member::Time kFirstRetry(100);
constexpr Member::Time kLastRetry(2000);
constexpr std::chrono::seconds kFlushLimit(1);

Hello hello_of(const Address& address, int slot) {
  std::random_device random;
  Hello hello;
  hello.token = address.token;
  hello.id = (static_cast<ProcessId>(random()) << 32) | random() | 1;
  hello.slot = slot;
  hello.pid = static_cast<int>(::getpid());
  hello.host = host_name();
  return hello;
}

}  // namespace

MemberLink::MemberLink(Address address, int slot, std::function<void(const std::string&)> stop)
    : address_(std::move(address)),
      stop_(std::move(stop)),
      member_(hello_of(address_, slot), Member::Time(0)) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot make a pipe");
  }
  wake_read_ = Fd(ends[0]);
  wake_write_ = Fd(ends[1]);
  // The thread takes no signal that is meant for the program.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = start_thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

MemberLink::~MemberLink() {
  flush();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    ends_ = true;
    wake(lock);
  }
  thread_.join();
}

Member::Time MemberLink::now() const {
  return std::chrono::duration_cast<Member::Time>(std::chrono::steady_clock::now() - start_);
}

void MemberLink::wake(std::unique_lock<std::mutex>& /*lock*/) {
  const char byte = 0;
  (void)!::write(wake_write_.get(), &byte, 1);  // a full pipe wakes, too
  changed_.notify_all();
}

std::string MemberLink::local_host() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return local_host_;
}

void MemberLink::flush() {
  std::unique_lock<std::mutex> lock(mutex_);
  wake(lock);
  changed_.wait_for(lock, kFlushLimit, [this] {
    return !member_.has_orders() && (!channel_ || channel_.all_sent());
  });
}

void MemberLink::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ends_) {
    read_lines();
    member_.on_time(now());
    follow_orders(lock);
    connect_if_due(lock);
    changed_.notify_all();
    if (!ends_ && !member_.has_orders()) wait_for_event(lock);
  }
}

void MemberLink::read_lines() {
  if (!channel_) return;
  for (const auto& line : channel_.exchange()) {
    const auto message = message_of<CoordinatorMessage>(line);
    if (message) member_.on_message(now(), *message);
  }
  if (!channel_) member_.on_disconnected(now());
}

/// Without the lock while groups are aborted: what that wakes may ask for the stage.
void MemberLink::follow_orders(std::unique_lock<std::mutex>& lock) {
  for (const auto& order : member_.take_orders()) {
    if (const auto* send = std::get_if<Member::Send>(&order)) {
      channel_.send(line_of(send->message));
    } else if (std::holds_alternative<Member::Connect>(order)) {
      channel_.close();  // what it has not sent by now is said again
      wants_connection_ = true;
      next_try_ = now();
      retry_after_ = kFirstRetry;
    } else if (std::holds_alternative<Member::Disconnect>(order)) {
      wants_connection_ = false;
      channel_.close_after_sending();
    } else if (const auto* stop = std::get_if<Member::Stop>(&order)) {
      changed_.notify_all();
      lock.unlock();
      stop_(stop->why);
      lock.lock();
    }
  }
}

void MemberLink::connect_if_due(std::unique_lock<std::mutex>& lock) {
  if (!wants_connection_ || channel_ || now() < next_try_) return;
  lock.unlock();
  Fd socket = connect_to(address_.host, address_.port);
  lock.lock();
  next_try_ = now() + retry_after_;
  retry_after_ = std::min(2 * retry_after_, kLastRetry);
  if (!socket || !wants_connection_) return;
  wants_connection_ = false;
  channel_ = LineChannel(std::move(socket));
  local_host_ = channel_.local_host();
  member_.on_connected(now());
}

void MemberLink::wait_for_event(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> waited = {{wake_read_.get(), POLLIN, 0}};
  channel_.add_to(waited);
  auto until = member_.next_time();
  if (wants_connection_) until = std::min(until, next_try_);
  const bool over = member_.stage() == Member::Stage::Over;
  const auto left = over ? Member::Time(-1) : std::max(until - now(), Member::Time(0));
  lock.unlock();
  ::poll(waited.data(), waited.size(), static_cast<int>(left.count()));
  char bytes[64];
  while (::read(wake_read_.get(), bytes, sizeof(bytes)) > 0) {
  }
  lock.lock();
}

}  // namespace ddp::membership
