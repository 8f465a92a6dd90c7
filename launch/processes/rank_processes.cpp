#include "launch/processes/rank_processes.h"

#include <array>
#include <csignal>
#include <cstdint>

#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ddp/internal/ranges.h>

#include "launch/processes/process_tree.h"
#include "launch/texts.h"

namespace ddp::launch {

DeathWatch::DeathWatch() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw_errno("cannot watch processes");
}

void DeathWatch::watch(pid_t pid) {
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // always close-on-exec
  if (!pidfd) return;
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = static_cast<uint64_t>(pid);
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd.get(), &event) != 0) return;
  watched_.push_back({pid, std::move(pidfd)});
}

std::vector<pid_t> DeathWatch::died() {
  // epoll keeps its ready list in the order of the kernel's wake-ups, and so in the order of
  // deaths.
  std::array<epoll_event, 64> events;
  std::vector<pid_t> result;
  for (;;) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
    if (count <= 0) return result;
    for (int i = 0; i < count; ++i) {
      const auto pid = static_cast<pid_t>(events[i].data.u64);
      result.push_back(pid);
      const auto watched = find_if(watched_, [pid](const Watched& w) { return w.pid == pid; });
      // Closing it is not enough: a rank that was forked has a copy until it closes that.
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched->pidfd.get(), nullptr);
      watched_.erase(watched);
    }
  }
}

bool DeathWatch::watches(pid_t pid) const {
  return any_of(watched_, [pid](const Watched& w) { return w.pid == pid; });
}

void RankProcesses::add(int rank, pid_t pid, int output) {
  running_.push_back({rank, pid, output});
  deaths_.watch(pid);
  any_left_ = true;
}

std::vector<RankProcesses::Ended> RankProcesses::reap() {
  std::vector<Ended> ended;
  const auto take = [&](pid_t pid) {
    const auto rank = find_if(running_, [pid](const Rank& one) { return one.pid == pid; });
    const bool is_rank = rank != running_.end();
    // Before it is reaped: until then its id belongs to its group.
    if (is_rank && kills_groups_) ::kill(-pid, SIGKILL);
    const int status = ddp::launch::reap(pid, 0).value();
    if (!is_rank) return;
    ended.push_back({*rank, status});
    running_.erase(rank);
  };
  for (const pid_t pid : deaths_.died()) take(pid);
  // Reaps the rest: processes whose parent died before them, and ranks on kernels without pidfds.
  for (;;) {
    siginfo_t info = {};
    any_left_ = ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
    // Leave a watched rank that died just now for the next round, to keep the order of deaths.
    if (!any_left_ || info.si_pid == 0 || deaths_.watches(info.si_pid)) return ended;
    take(info.si_pid);
  }
}

std::vector<RankProcesses::Stopped> RankProcesses::take_stops() {
  constexpr int kChanges = WSTOPPED | WCONTINUED | WNOHANG;
  std::vector<Stopped> stopped;
  for (Rank& rank : running_) {
    siginfo_t info = {};
    if (::waitid(P_PID, static_cast<id_t>(rank.pid), &info, kChanges) != 0) continue;
    if (info.si_pid == 0) continue;
    rank.stopped = info.si_code == CLD_STOPPED;
    if (rank.stopped) stopped.push_back({rank, info.si_status});
  }
  return stopped;
}

void RankProcesses::send(int signal) const {
  for (const Rank& rank : running_) ::kill(-rank.pid, signal);
  for (const Process& process : descendants()) {
    const bool reached =
        any_of(running_, [&](const Rank& rank) { return rank.pid == process.group; });
    if (!reached) ::kill(process.pid, signal);
  }
}

void RankProcesses::kill(int rank, pid_t pid) const {
  for (const Rank& one : running_) {
    if (one.rank == rank && one.pid == pid) ::kill(-pid, SIGKILL);
  }
}

bool RankProcesses::all_are_stopped() const {
  return all_of(running_, [](const Rank& rank) { return rank.stopped; });
}

std::string RankProcesses::names() const {
  std::string names;
  for (const Rank& rank : running_) {
    names += (names.empty() ? "" : ", ") + rank_with_pid(rank.rank, rank.pid);
  }
  return names.empty() ? "the processes that the ranks left behind" : names;
}

}  // namespace ddp::launch
