// State shared by threads that wait for messages between stages.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>
#include <ddp/internal/group_monitor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "pipeline/messages/message_header.h"
#include "pipeline/messages/wire.h"

namespace ddp {

/// Whether anything is sent for a tensor.
bool has_bytes(const TensorDescription& tensor);

/// A thread that waits for messages while its rank computes, and the lock of what the two threads
/// share. An owner has it as its last member: then the thread ends before what it uses.
class TransferThread {
 public:
  using IsSo = c10::function_ref<bool()>;

  /// \param wire  lives longer.
  explicit TransferThread(const StageWire& wire) : wire_(wire) {}
  /// Ends the thread's waits: the group has failed if there are any.
  ~TransferThread();
  C10_DISABLE_COPY_AND_ASSIGN(TransferThread);

  /// \param work  What it throws, wait() throws.
  void start(std::function<void()> work);
  bool has_started() const { return thread_.joinable(); }

  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  /// Calls `change` under the lock, and wakes the other thread.
  void change(c10::function_ref<void()> change);

  /// For the computing thread: waits for at most the group's timeout.
  ///
  /// \param is_so  is called under the lock. \param where  is called without it.
  /// \throws c10::DistBackendError  as GroupMonitor::wait().
  void wait(IsSo is_so, WaitPoint where);

  /// For the thread's work: waits without a limit, because that of the computing thread's wait for
  /// the thread begins later.
  ///
  /// \param is_so  is called under the lock.
  /// \return  false once the destructor runs.
  bool wait_until(IsSo is_so);
  /// For the thread's work: waits for the end of a message, without a limit.
  ///
  /// \throws  where it is lost, and once the destructor runs.
  void wait_for(const c10::intrusive_ptr<c10d::Work>& message);

 private:
  void run(const std::function<void()>& work) noexcept;

  const StageWire& wire_;
  std::mutex mutex_;                 // guards the owner's state, and the members below
  std::condition_variable changed_;  // any of them
  bool is_over_ = false;
  std::exception_ptr failure_;                // of the thread
  c10::intrusive_ptr<c10d::Work> waits_for_;  // the thread
  std::thread thread_;
};

}  // namespace ddp
