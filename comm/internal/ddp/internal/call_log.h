// The list of what a rank calls, in a file that ddprun reads: rank_7.calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <ddp/export.h>
#include <ddp/internal/owner_process.h>

namespace ddp {

struct Collective;

/// Writes a line for each collective, message, wait and step of this process.
///
/// There is one where DDP_CALLS_DIR was set when the process made its first group. It buffers
/// lines, and writes them every 256 KiB and at the end of the process, whose line is the last one:
/// a list without it is of a process that was killed. That line is "ok" only where main() returned
/// 0, or exit() got it, and no failure was set.
///
/// Threads: all members.
/// Cost without it: one load of a pointer for each call.
class DDP_API CallLog {
 public:
  using Place = c10::function_ref<std::string()>;
  /// The parameters and buffers of a model.
  using Tensors = c10::function_ref<std::vector<at::Tensor>()>;

  /// Null: this process writes no list.
  static CallLog* active() { return active_pointer().load(std::memory_order_acquire); }

  /// Makes the log; does nothing where there is one.
  ///
  /// \param host_ranks  how many ranks a host has.
  /// \throws c10::Error  if the file cannot be made.
  static void start(const std::string& folder, int rank, int world_size, int host_ranks);

  CallLog(const std::string& path, int rank, int world_size, int host_ranks);
  ~CallLog();
  C10_DISABLE_COPY_AND_ASSIGN(CallLog);

  /// \param axis  "world", the name of a mesh's axis, or "group".
  /// \param ranks  in the job, in the group's order.
  /// \return  the group's number in the list.
  int add_group(const std::string& name, const std::string& axis, const std::vector<int>& ranks);

  /// \return  the call's number.
  uint64_t add_call(int group, const Collective& call);
  /// \param kind  "send", "recv" or "barrier".
  /// \param peer  a rank of the group; -1: none. \param tag  of a message.
  uint64_t add_call(
      int group, const char* kind, const std::vector<at::Tensor>& tensors, int peer, int tag);
  /// Remembers the handle of a call. Does not use it.
  void set_handle(const void* handle, uint64_t call);
  /// The call of a handle, which is forgotten: only the first wait of each is written.
  ///
  /// \return  0: it is of no call in the list.
  uint64_t take_handle(const void* handle);
  /// The program, or a stream, waits for a call; 0: for none.
  void add_wait(uint64_t call);
  /// The host has waited for other processes since `begin`; not for a moment's wait.
  void add_pause(int64_t begin_us);
  /// Since the first line.
  int64_t time_us() const;
  /// A forward pass of a model begins: of a new step, if the first parameter has changed since.
  ///
  /// The first model that calls this counts the steps, while it exists.
  ///
  /// \param parameters  that are trained. \param all  are looked at once a step.
  void add_forward(const at::Tensor& first, Tensors all);
  /// The text of the last line, unless the process goes on.
  void set_failure(const std::string& why);

 private:
  static std::atomic<CallLog*>& active_pointer();
  uint64_t write_call(
      int group, const char* kind, int dtype, int64_t bytes, int peer, int tag = -1);
  void write(const std::string& line);
  void flush();
  void close(int exit_status) noexcept;

  const OwnerProcess owner_{};
  const int64_t began_us_;
  std::recursive_mutex mutex_;  // guards the members below
  int file_ = -1;
  std::string buffer_;
  std::string failure_;
  int groups_ = 0;
  uint64_t calls_ = 0;
  std::unordered_map<const void*, uint64_t> handles_;
  c10::weak_intrusive_ptr<c10::TensorImpl> counting_;  // the first parameter
  uint32_t version_ = 0;                               // of it, when the last step began
  int64_t steps_ = 0;
};

/// While it exists, calls of this thread that start are of this place.
class DDP_API CallPlace {
 public:
  explicit CallPlace(CallLog::Place place);
  ~CallPlace();
  C10_DISABLE_COPY_AND_ASSIGN(CallPlace);

 private:
  const CallLog::Place place_;
  const CallLog::Place* const outer_;
};

/// A forward pass of a module that trains begins; as CallLog::add_forward(), where there is a log.
template <typename Module>
void log_forward(at::ArrayRef<const Module*> modules) {
  auto* const log = CallLog::active();
  if (log == nullptr || !c10::GradMode::is_enabled()) return;
  std::vector<at::Tensor> all;
  for (const auto* module : modules) {
    for (const auto& parameter : module->parameters()) all.push_back(parameter);
  }
  for (const auto& first : std::vector<at::Tensor>(all)) {
    if (!first.requires_grad()) continue;
    return log->add_forward(first, [&] {
      for (const auto* module : modules) {
        for (const auto& buffer : module->buffers()) all.push_back(buffer);
      }
      return all;
    });
  }
}

/// The same of a layer that may be the only one that this library knows of its model.
inline void log_layer_forward(const at::Tensor& weight) {
  auto* const log = CallLog::active();
  if (log == nullptr || !c10::GradMode::is_enabled()) return;
  log->add_forward(weight, [] { return std::vector<at::Tensor>(); });
}

/// The program, or a stream, waits for a handle.
inline void log_wait(const void* handle) {
  if (auto* const log = CallLog::active()) log->add_wait(log->take_handle(handle));
}

/// A wait of the host for other processes: from the constructor to the destructor.
class HostWait {
 public:
  HostWait() : log_(CallLog::active()), begin_us_(log_ ? log_->time_us() : 0) {}
  ~HostWait() {
    if (log_) log_->add_pause(begin_us_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(HostWait);

 private:
  CallLog* const log_;
  const int64_t begin_us_;
};

}  // namespace ddp
