#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <ddp/process_group.h>

#include "base/executor.h"

namespace ddp {

/// Makes a generation's group on a thread of its own, so that the end of the generation ends the
/// wait for it: what connects waits for the ranks, and for their hosts, with limits of its own.
/// Then that thread is left to itself, and drops what it made.
class Meeting {
 public:
  using Make = std::function<ProcessGroup()>;

  /// Has run() look at `is_cancelled` again.
  void wake();

  /// \return  what `make` returned; empty once `is_cancelled`.
  /// \throws  the exception of `make`.
  ProcessGroup run(Make make, const std::function<bool()>& is_cancelled);

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// A TCPStore of this process, on a port that the kernel chooses.
///
/// \param host  that the other ranks reach it by; of a loopback address it listens on that alone.
/// \param address  set to "HOST:PORT".
c10::intrusive_ptr<c10d::Store> open_generation_store(
    const std::string& host, std::chrono::milliseconds timeout, std::string& address);

}  // namespace ddp
