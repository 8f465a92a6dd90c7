#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/membership/line_channel.h>
#include <ddp/internal/system/fd.h>

#include "membership/member.h"

namespace ddp::membership {

/// Carries a Member's lines: one socket and one thread for a process.
///
/// Threads: all calls are safe; `stop` runs on the link's thread.
class MemberLink {
 public:
  /// \param slot  -1: the coordinator chooses one.
  /// \param stop  called when a generation ends, with the reason: aborts its groups, so that what
  ///        waits for them throws. While it runs, no sign of life is sent.
  MemberLink(Address address, int slot, std::function<void(const std::string&)> stop);
  /// Ends the thread; the coordinator sees the connection end.
  ~MemberLink();
  MemberLink(const MemberLink&) = delete;
  MemberLink& operator=(const MemberLink&) = delete;

  /// Calls `use(member, now)` and sends what it ordered.
  template <typename Use>
  auto with(const Use& use) {
    std::unique_lock<std::mutex> lock(mutex_);
    if constexpr (std::is_void_v<decltype(use(member_, now()))>) {
      use(member_, now());
      wake(lock);
    } else {
      auto result = use(member_, now());
      wake(lock);
      return result;
    }
  }

  /// Calls `read(member)`, which must change nothing: no message has to be sent.
  template <typename Read>
  auto look(const Read& read) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return read(member_);
  }

  /// This host's address on the way to the coordinator; "" before the first connection.
  std::string local_host() const;

  /// Waits until `is_true(member)`, or the member is Over; the member's own limits bound it.
  template <typename Condition>
  void wait_until(const Condition& is_true) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return member_.stage() == Member::Stage::Over || is_true(member_); });
  }

  /// The same, until a time at most; returns whether it is true.
  template <typename Condition>
  bool wait_until(std::chrono::steady_clock::time_point time, const Condition& is_true) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, time, [&] { return is_true(member_); });
  }

  /// Waits until what was said before is on its way, for at most a second.
  void flush();

 private:
  Member::Time now() const;
  void run();
  void follow_orders(std::unique_lock<std::mutex>& lock);
  void connect_if_due(std::unique_lock<std::mutex>& lock);
  void read_lines();
  void wait_for_event(std::unique_lock<std::mutex>& lock);
  void wake(std::unique_lock<std::mutex>& lock);

  const Address address_;
  const std::function<void(const std::string&)> stop_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Member member_;
  LineChannel channel_;
  std::string local_host_;
  bool wants_connection_ = false;
  Member::Time next_try_{0};
  Member::Time retry_after_{100};
  bool ends_ = false;
  Fd wake_read_;
  Fd wake_write_;
  std::thread thread_;
};

}  // namespace ddp::membership
