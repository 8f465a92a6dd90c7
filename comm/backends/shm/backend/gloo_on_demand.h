#pragma once

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include <c10/util/FunctionRef.h>

#include "../../setup.h"

namespace ddp::backends::shm {

/// The Gloo of a group. It connects when a call first needs it, if it is not given as connected:
/// most groups never do, and it takes threads and sockets.
///
/// All ranks of the group must connect, so only collectives may.
///
/// Thread safety: all members.
class GlooOnDemand {
 public:
  using Connect = std::function<BackendPtr()>;

  explicit GlooOnDemand(BackendPtr connected);
  /// \param connect  runs on a thread of its own, which may be abandoned.
  explicit GlooOnDemand(Connect connect);

  /// Null before connect().
  BackendPtr if_connected() const;

  /// Connects, if no call did before.
  ///
  /// \param why_not  why a rank will not come; "" while all may. Called while this rank waits.
  /// \throws c10::Error  as `connect`. c10::DistBackendError if a rank will not come.
  BackendPtr connect(c10::function_ref<std::string()> why_not);

  /// Aborts Gloo, now or once it is connected.
  void abort();

 private:
  struct State {
    std::mutex mutex;  // guards the members below
    BackendPtr gloo;
    bool aborted = false;
  };

  const std::shared_ptr<State> state_ = std::make_shared<State>();  // shared with the thread
  const Connect connect_;
  std::mutex mutex_;                           // guards connecting_
  std::shared_future<BackendPtr> connecting_;  // invalid before the first connect()
};

}  // namespace ddp::backends::shm
