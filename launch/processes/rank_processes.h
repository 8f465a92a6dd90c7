#pragma once

#include <string>
#include <vector>

#include <sys/types.h>

#include "launch/pipe.h"

namespace ddp::launch {

/// Reports children in the order in which they died; waitpid reports them by age.
///
/// When one rank fails, its peers lose their connections to it and fail a moment later. A busy
/// launcher finds all of them dead at once, and has to report the rank that failed first.
class DeathWatch {
 public:
  DeathWatch();

  /// Starts to watch a child. Does nothing where the kernel lacks pidfds (before Linux 5.3).
  void watch(pid_t pid);

  /// Returns the watched children that died since the last call, first death first, and stops
  /// watching them. They still have to be reaped.
  std::vector<pid_t> died();

  /// Whether `died()` will return this child.
  bool watches(pid_t pid) const;

  /// The descriptor that polls as readable while `died()` has a child to return.
  int fd() const { return epoll_.get(); }

 private:
  struct Watched {
    pid_t pid;
    Fd pidfd;
  };
  Fd epoll_;
  std::vector<Watched> watched_;
};

/// The processes of one host's ranks, and all processes below them.
///
/// The job is every process below this one, so this process has to be a subreaper (`run_guarded`
/// makes it one): a rank's own children are ended with it wherever they moved.
class RankProcesses {
 public:
  struct Rank {
    int rank;
    pid_t pid;
    int output;            // its place in Output
    bool stopped = false;  // by SIGSTOP and the like
  };
  struct Ended {
    Rank rank;
    int status;
  };
  struct Stopped {
    Rank rank;
    int signal;
  };

  /// \param kills_groups  what a rank left running in its process group is killed with it, because
  ///        another process takes its place. Otherwise it ends with the job.
  explicit RankProcesses(bool kills_groups) : kills_groups_(kills_groups) {}

  void add(int rank, pid_t pid, int output);

  /// Reaps what has ended; returns the ranks among it, first death first.
  std::vector<Ended> reap();
  /// The ranks that were stopped since the last call.
  std::vector<Stopped> take_stops();

  /// Takes no process for a rank that was added before.
  void forget() { running_.clear(); }

  /// Signals each process once: some programs take a second signal as an order to hurry.
  void send(int signal) const;
  /// Kills a rank and its process group, if it runs.
  void kill(int rank, pid_t pid) const;

  const std::vector<Rank>& running() const { return running_; }
  int count() const { return static_cast<int>(running_.size()); }
  /// Whether any process was left, as of the last reap().
  bool any_left() const { return any_left_; }
  bool all_are_stopped() const;
  /// "rank 0 (pid 12), rank 1 (pid 13)", or a text for processes that outlived their ranks.
  std::string names() const;

  /// The descriptor that polls as readable when a rank has died.
  int fd() const { return deaths_.fd(); }

 private:
  const bool kills_groups_;
  DeathWatch deaths_;
  std::vector<Rank> running_;
  bool any_left_ = false;
};

}  // namespace ddp::launch
