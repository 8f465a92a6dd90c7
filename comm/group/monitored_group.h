#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/owner_process.h>
#include <ddp/internal/text.h>
#include <ddp/process_group_options.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "backends/registry.h"
#include "base/network_interface.h"
#include "calls/call_history.h"
#include "group/backend_spec.h"
#include "work/collective_handle.h"

namespace ddp {

class JobMonitor;
struct PretendedJob;

/// The settings that a group was made with, so that its subgroups are made alike.
struct GroupRecipe {
  BackendSpec backends;
  GlooDevices gloo_devices;
  std::chrono::milliseconds timeout{0};
  std::vector<int> world_ranks;   // of the group's ranks
  bool backends_required = true;  // the user named them; else others may replace them
  std::shared_ptr<JobMonitor> job = {};
  std::optional<c10::Device> device_id = {};  // this rank's GPU, to which NCCL connects at once
  NcclOptions nccl = {};
  std::optional<int> local_rank =
      {};                       // counted over the ranks of this host, if no launcher gave it
  bool is_mirror = false;       // of a process that has not met the other ranks yet
  std::string coordinate = {};  // of this rank in a mesh: "dp 1, tp 0"; "" without one
  std::string axis = "world";   // of a mesh, for the list of calls; else "group"
  std::shared_ptr<PretendedJob> pretended = {};  // of ranks that need not exist
};

/// A process group that this library made, with its monitor and the history of its calls.
///
/// Collectives go to the backends directly, and not through c10d's dispatcher, whose fallback for
/// autograd boxes each call. Profilers see them by the dispatcher's names all the same.
///
/// It is shut down only in the process that made it. A process that a rank forked has a copy of the
/// group. There, collectives are errors, abort() and shutdown() do nothing, and dropping the last
/// reference leaks the group with its backends and its store. Their destructors would wait for
/// threads that the forked process does not have, and write to the rank's sockets and memory.
///
/// After shutdown() it starts no collectives, whatever its backends would do. If an exception
/// destroys the group, it reports that to the other ranks.
///
/// The end of a group waits for the collectives that have started on a device, with the monitor:
/// NCCL's backend aborts in its destructor, so their results would be lost, and its shutdown()
/// waits without a bound. After a failure such a backend is not shut down, for it is aborted.
class MonitoredGroup : public Uniform<c10d::ProcessGroup> {
 public:
  static c10::intrusive_ptr<MonitoredGroup> make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  using Uniform::Uniform;  // for make()

  /// Remembers under which name a device's backend is registered, which may itself say another.
  /// Before start_monitor().
  void set_registered_name(c10::DeviceType device, const std::string& name) {
    registered_names_[device] = name;
  }
  /// Has collectives go to the backends that the group has now: for tests that set another one.
  void find_backends();
  /// The name of the backend that serves a device: as registered, else as it says itself.
  std::string backend_name(c10::DeviceType device) const {
    const auto named = registered_names_.find(device);
    return named != registered_names_.end() ? named->second
                                            : serving(device).backend->getBackendName();
  }
  /// \throws c10::Error  if the group has none for tensors of that device.
  const backends::ServedBackend& serving(c10::DeviceType device) const;

  /// Makes the monitor, as a part of the recipe's job.
  ///
  /// \param recipe  that the backends were made with.
  /// \param key  of the group; differs between the groups of a job.
  void start_monitor(GroupRecipe recipe, const std::string& key);

  /// Set by start_monitor().
  const GroupRecipe& recipe() const { return recipe_; }

  const std::shared_ptr<GroupMonitor>& monitor() const { return monitor_; }

  /// The key of the next group that all ranks of this group make together.
  std::string next_subgroup_key() { return ddp::str(key_, '/', ++subgroups_made_); }

  /// Adds a call that starts no collective to the history that the ranks compare.
  void record(const CollectiveCall& call, c10::DeviceType device);

  /// \throws c10::Error  after shutdown(), and in a process that this rank forked.
  void check_in_use() const;
  void shutdown() override;
  void abort() override;
  void release_resources() override;

  WorkPtr run(Collective collective) override;
  WorkPtr barrier(const c10d::BarrierOptions& o) override;
  /// Writes a call into the list of calls, if there is one.
  ///
  /// \param tag  of a message. \return  its number in the list; 0: it is not in it.
  uint64_t log_call(const char* kind, const Tensors& tensors, int peer, int tag = -1) const;
  /// Has the monitor watch a batch of messages, and returns it.
  ///
  /// \param tensors  not empty; describes it.
  WorkPtr watched_message(WorkPtr work, const Tensors& tensors);
  // Not recorded, because they are not collectives.
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  void refused(Kind kind, const std::exception& error) override;
  WorkPtr recorded(
      const CollectiveCall& call, c10::DeviceType device, c10::function_ref<WorkPtr()> start);
  WorkPtr start_message(
      const char* dispatcher_name, const char* kind, const Tensors& tensors, int peer, int tag,
      c10::function_ref<WorkPtr(c10d::Backend&)> start);
  WorkPtr watched(
      WorkPtr work, const CollectiveCall& call, c10::DeviceType device,
      bool is_single_message = false);
  void finish();
  void finish_on_device();
  void abort_on_device();

  const OwnerProcess owner_{};
  std::atomic<bool> is_shut_down_{false};
  const std::shared_ptr<CallHistory> calls_ = std::make_shared<CallHistory>();
  GroupRecipe recipe_;
  std::map<c10::DeviceType, std::string> registered_names_;
  std::map<c10::DeviceType, backends::ServedBackend> served_;  // since start_monitor()
  std::string key_;
  std::atomic<uint64_t> subgroups_made_{0};
  std::shared_ptr<GroupMonitor> monitor_;
  int number_in_log_ = -1;                       // of CallLog; -1: its calls are not in the list
  std::vector<c10::DeviceType> stream_devices_;  // whose collectives only a stream waits for
  // While a weak reference exists, c10 calls release_resources() instead of the destructor when the
  // last other reference is dropped. In the process that made the group, that drops this one.
  c10::weak_intrusive_ptr<c10d::ProcessGroup> self_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

/// The name of the group's backend for a device.
std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device);

/// The device of a barrier. As Python: the group's device_id, else the CPU if the group has a
/// backend for it, else the current device of a type that it has one for.
c10::Device barrier_device(const c10d::ProcessGroup& group);

/// Returns the monitor of a group that this library made; null for any other group.
std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group);

/// Whether the handle's wait() makes the stream wait, where the backend does that, or always the
/// host.
enum class WaitOn { Stream, Host };

/// Starts a collective whose handle waits with the group's monitor. A group of one rank, and one
/// that this library did not make, have none.
///
/// \param name  "all_reduce", for error texts.
/// \param device  of the tensors.
/// \param start  starts the collective in a backend, with arguments that were checked before.
/// \param peers  the ranks whose part in it the handle waits for.
/// \throws c10::DistBackendError  if the group is aborted, or if `start` throws, which aborts it.
WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers = Peers::All,
    WaitOn wait_on = WaitOn::Stream);

/// The same with a text for errors that is made when it is needed.
WorkPtr monitored(
    std::function<std::string()> where, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers);

/// The same for a message.
///
/// \param peer  the rank of the group that sends or receives it; unset: any sender.
WorkPtr monitored_message(
    bool sends, std::optional<int> peer, int tag, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start);

}  // namespace ddp
