#pragma once

#include <csignal>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sys/types.h>

#include "launch/environment.h"

namespace ddp::launch {

/// Writes what C's and C++'s standard streams hold. A copy of this process would write it again.
void flush_streams();

/// A function that ranks call in copies of the process that made this object.
///
/// The copies tell how they end through memory that all of them share, so nothing is lost when one
/// is killed, and no text is too long for a pipe.
class RankFunction {
 public:
  struct Failure {
    int rank;
    pid_t pid;
    int status;
  };

  /// Remembers the signals, descriptors and name of this process, for the ranks.
  ///
  /// \throws std::system_error  when there is no memory for the ranks' texts.
  RankFunction(std::function<void(int)> body, int ranks);
  ~RankFunction();
  RankFunction(const RankFunction&) = delete;
  RankFunction& operator=(const RankFunction&) = delete;

  /// Calls the function in a rank's process, and ends that.
  [[noreturn]] void run(int rank, const Environment& environment) const;

  // For the processes above the ranks.
  void begin_attempt();
  void note(std::string_view line);
  /// The first one of an attempt counts.
  void note_failure(const Failure& failure);
  void note_end(int code);

  // For the process that made it, once the others have ended.
  std::optional<int> code() const;
  std::optional<Failure> failure() const;
  std::vector<std::string> notes() const;
  /// The text of the exception that the rank's function threw, if it threw one.
  std::optional<std::string> thrown(int rank) const;

  /// The signals that this process had blocked.
  const sigset_t& blocked() const { return blocked_; }

 private:
  struct Text;
  struct Shared;

  void restore() const;

  const std::function<void(int)> body_;
  const size_t size_;  // bytes of shared_
  Shared* const shared_;
  const std::vector<int> descriptors_;
  std::string name_;
  sigset_t blocked_;
  struct sigaction on_child_ = {};
  struct sigaction on_pipe_ = {};
};

}  // namespace ddp::launch
