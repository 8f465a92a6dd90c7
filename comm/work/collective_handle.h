#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/group_monitor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace ddp {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The works that a call has started, and its last step.
struct StartedCall {
  /// Not empty.
  std::vector<WorkPtr> parts;
  /// The last step, once all parts are complete; may be empty. It copies out of buffers that a
  /// backend needed in place of the caller's tensors, so it owns them.
  std::function<void()> finish = {};
  /// The tensors that `result()` returns; of a single part without a last step, that part says it.
  std::vector<at::Tensor> outputs = {};
  /// All memory that the parts and the last step use and the caller does not have.
  std::vector<at::Tensor> buffers = {};
};

/// How a wait without a limit watches the other ranks.
struct CallWatch {
  std::shared_ptr<GroupMonitor> monitor;
  std::function<std::string()> where;
  bool on_stream = false;  ///< the stream waits, and not the host
  Peers peers = Peers::All;
  c10::intrusive_ptr<c10d::ProcessGroup> group =
      {};  ///< alive until the handle is gone: a wait that fails aborts it
};

/// The handle of a call: of its parts, its last step, and the monitor that watches its waits.
///
/// The last step runs once: in the first `wait()`, in an `isCompleted()` that finds all parts
/// complete, or in a callback of `getFuture()`. On a device the step is queued on the current
/// stream of the thread that runs it; the current streams of later callers wait for it. That stream
/// may be another one than the buffers were allocated on, which must not reuse them before.
///
/// The future does not own the handle: a thread of the backend runs its callbacks, and would join
/// itself where it dropped the last reference to the group.
class CollectiveHandle : public c10d::Work {
 public:
  explicit CollectiveHandle(StartedCall call, std::optional<CallWatch> watch = {});

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return call_->parts.front()->sourceRank(); }
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override { return call_->parts.front()->getDuration(); }
  uint64_t getSequencenumber() const override { return call_->parts.front()->getSequencenumber(); }

 private:
  /// The call, and whether its last step has run; shared with the callbacks of the future.
  struct Call : StartedCall {
    explicit Call(StartedCall started) : StartedCall(std::move(started)) {}

    /// A single part without a last step: its own members do.
    bool is_plain() const { return parts.size() == 1 && !finish; }
    void synchronize();
    void finish_once();
    std::vector<c10::Device> devices() const;  // of the outputs, but for the CPU

    std::once_flag finished;
    std::optional<c10::Event> finished_on_device;
  };

  void watch_part(c10d::Work& part) const;

  const std::shared_ptr<Call> call_;
  const std::optional<CallWatch> watch_;
};

/// The part itself where a handle would add nothing.
WorkPtr handle_of(StartedCall call);

}  // namespace ddp
