// How calls start in a group, and what its backends can do.
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/gradient_memory.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/tensor_memory.h>
#include <ddp/internal/text.h>

#include "backends/registry.h"
#include "group/monitored_group.h"
#include "monitor/job_monitor.h"
#include "monitor/rank_report.h"

namespace ddp {
namespace {

/// The function of c10d's dispatcher that c10d::ProcessGroup calls.
const char* dispatcher_name(c10d::OpType type) {
  using c10d::OpType;
  switch (type) {
    case OpType::ALLREDUCE:
      return "c10d::allreduce_";
    case OpType::ALLREDUCE_COALESCED:
      return "c10d::allreduce_coalesced_";
    case OpType::BROADCAST:
      return "c10d::broadcast_";
    case OpType::REDUCE:
      return "c10d::reduce_";
    case OpType::ALLGATHER:
      return "c10d::allgather_";
    case OpType::_ALLGATHER_BASE:
      return "c10d::_allgather_base_";
    case OpType::GATHER:
      return "c10d::gather_";
    case OpType::SCATTER:
      return "c10d::scatter_";
    case OpType::REDUCE_SCATTER:
      return "c10d::reduce_scatter_";
    case OpType::_REDUCE_SCATTER_BASE:
      return "c10d::_reduce_scatter_base_";
    case OpType::ALLTOALL:
      return "c10d::alltoall_";
    case OpType::ALLTOALL_BASE:
      return "c10d::alltoall_base_";
    default:
      return "c10d::barrier";
  }
}

/// The tensors of its arguments, in its order.
std::vector<c10::IValue> dispatcher_tensors(const Collective& c) {
  const bool is_single = c.whole_in.defined() || c.whole_out.defined();
  if (is_single) {
    return {
        c.whole_out.defined() ? c.whole_out : c.out[0],
        c.whole_in.defined() ? c.whole_in : c.in[0]};
  }
  const bool in_place = c.kind == CollectiveKind::AllReduce ||
                        c.kind == CollectiveKind::Broadcast || c.kind == CollectiveKind::Reduce;
  if (in_place) return {c.in};
  return {c.out, c.in};
}

thread_local uint64_t started_calls = 0;

using backends::ServedBackend;

/// The capabilities of a group's backend now: it may have connected since.
BackendCapabilities capabilities_now(const ServedBackend& served, c10::Device device) {
  const auto& [backend, description, described, _] = served;
  auto capabilities = described;
  // A list of calls has the memory of buckets, which is that of any backend without its own.
  if (CallLog::active()) capabilities.reduces_in_own_memory = false;
  capabilities.reduces_in_own_memory =
      capabilities.reduces_in_own_memory && backend->supportsTensorAlloc(device.index());
  capabilities.has_own_memory =
      capabilities.reduces_in_own_memory &&
      (!description || !description->is_connected || description->is_connected(*backend));
  return capabilities;
}

std::shared_ptr<GradientMemory> memory_of(const ServedBackend& served) {
  const auto* description = served.description;
  if (!description || !description->gradient_memory || CallLog::active()) return nullptr;
  return description->gradient_memory(*served.backend);
}

WorkPtr start_monitored(
    std::function<std::string()> where, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers, WaitOn wait_on) {
  const auto monitor = own_monitor_of(group);
  if (!monitor || group.getSize() == 1) return handle_of(start());
  StartedCall call;
  const auto doing = [&] { return ddp::str("starting ", where()); };
  monitor->abort_on_error(doing, [&] {
    const CallPlace place(where);
    call = start();
  });
  CallWatch watch{monitor, std::move(where)};
  watch.on_stream = wait_on == WaitOn::Stream && capabilities_of(group, device).waits_on_stream;
  watch.peers = peers;
  watch.group = ProcessGroup::unsafe_reclaim_from_nonowning(&group);
  return c10::make_intrusive<CollectiveHandle>(std::move(call), std::move(watch));
}

}  // namespace

const backends::ServedBackend& MonitoredGroup::serving(c10::DeviceType device) const {
  const auto found = served_.find(device);
  DDP_CHECK(
      found != served_.end(), "process group: expected a tensor of a device that it has a backend ",
      "for, got one of ", device, " ", on_rank_text(*this),
      ". Name a backend for it: backend(\"cpu:gloo,cuda:nccl\").");
  return found->second;
}

BackendCapabilities capabilities_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto type = device.type();
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  return own ? capabilities_now(own->serving(type), device)
             : capabilities_now(backends::served(group.getBackend(type)), device);
}

std::shared_ptr<GradientMemory> gradient_memory_of(c10d::ProcessGroup& group, c10::Device device) {
  const auto type = device.type();
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  return own ? memory_of(own->serving(type)) : memory_of(backends::served(group.getBackend(type)));
}

std::string backend_name(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto* own = dynamic_cast<const MonitoredGroup*>(&group);
  return own ? own->backend_name(device) : group.getBackend(device)->getBackendName();
}

std::string get_backend(const GroupArg& group_arg) {
  const auto group = group_arg.get();
  std::map<std::string, std::string> by_device;  // in the order of their names
  for (const auto& device : group->getDeviceTypes()) {
    const auto type = device.type();
    by_device[c10::DeviceTypeName(type, /*lower_case=*/true)] = backend_name(*group, type);
  }
  std::string list;
  for (const auto& [device, name] : by_device) {
    list += ddp::str(list.empty() ? "" : ",", device, ':', name);
  }
  const auto is_first = [&](const auto& of_device) {
    return of_device.second == by_device.begin()->second;
  };
  return !by_device.empty() && all_of(by_device, is_first) ? by_device.begin()->second : list;
}

std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group) {
  const auto* monitored = dynamic_cast<const MonitoredGroup*>(&group);
  return monitored ? monitored->monitor() : nullptr;
}

c10::Device barrier_device(const c10d::ProcessGroup& group) {
  if (const auto bound = group.getBoundDeviceId()) return *bound;
  const auto types = group.getDeviceTypes();
  for (const auto& device : types) {
    if (device.is_cpu()) return device;
  }
  DDP_CHECK(
      !types.empty(), "barrier: expected a group with a backend, got one without ",
      on_rank_text(group), ". Make it with init_process_group.");
  return c10::impl::VirtualGuardImpl(types.front().type()).getDevice();
}

void MonitoredGroup::check_in_use() const {
  owner_.check("process group");
  DDP_CHECK(
      !is_shut_down_,
      "process group: expected one that is in use, got one that was destroyed on rank ", getRank(),
      " of ", getSize(), ". Make a new group, and a new wrapper of the module over it.");
}

uint64_t calls_of_this_thread() { return started_calls; }

WorkPtr MonitoredGroup::run(Collective c) {
  const auto device = c.first().device().type();
  RECORD_FUNCTION(dispatcher_name(c.type), dispatcher_tensors(c));
  auto* const log = number_in_log_ < 0 ? nullptr : CallLog::active();
  const auto number = log ? log->add_call(number_in_log_, c) : 0;
  auto work = recorded(c.described(), device, [&] {
    const MemoryScope of_backend(MemoryKind::Uncounted);
    const auto& to = serving(device);
    return to.runner ? to.runner->run(std::move(c)) : run_on(*to.backend, std::move(c));
  });
  if (log) log->set_handle(work.get(), number);
  return work;
}

uint64_t MonitoredGroup::log_call(
    const char* kind, const Tensors& tensors, int peer, int tag) const {
  auto* const log = number_in_log_ < 0 ? nullptr : CallLog::active();
  return log ? log->add_call(number_in_log_, kind, tensors, peer, tag) : 0;
}

void MonitoredGroup::refused(Kind kind, const std::exception& error) {
  if (getSize() == 1 || !monitor_ || !owner_.is_this_one()) return;
  monitor_->fail(ddp::str(
      to_text(kind), " could not be started on ", monitor_->rank_text(), ": ", text_of(error)));
}

WorkPtr MonitoredGroup::recorded(
    const CollectiveCall& call, c10::DeviceType device, c10::function_ref<WorkPtr()> start) {
  check_in_use();
  DDP_CHECK(
      !recipe_.job || !recipe_.job->is_generation() || !is_capturing(c10::Device(device)),
      "process group: expected no capture into a graph in an elastic job, got one ",
      on_rank_text(*this),
      ". A graph keeps the communicators of ranks that may be lost. Train without CapturedStep.");
  if (getSize() == 1) return start();
  ++started_calls;
  const auto lane = CallHistory::lane_of(device);
  // Added before the start, which may run callbacks that start other collectives.
  const auto number = calls_->add(lane, call);
  try {
    auto work = start();
    calls_->set_handle(lane, number, work.get());
    return watched(std::move(work), call, device);
  } catch (...) {
    calls_->remove_latest(lane, number);
    throw;
  }
}

WorkPtr MonitoredGroup::watched(
    WorkPtr work, const CollectiveCall& call, c10::DeviceType device, bool is_single_message) {
  const bool on_stream = contains(stream_devices_, device);
  if (work && monitor_ && on_stream && !is_capturing(c10::Device(device))) {
    monitor_->watch(*work, call, is_single_message);
  }
  return work;
}

WorkPtr MonitoredGroup::watched_message(WorkPtr work, const Tensors& tensors) {
  return watched(
      std::move(work), describe_call(Kind::Message, tensors), tensors[0].device().type());
}

void MonitoredGroup::record(const CollectiveCall& call, c10::DeviceType device) {
  if (getSize() > 1) calls_->add(CallHistory::lane_of(device), call);
}

void record_differentiable_call(
    const ProcessGroup& group, const at::Tensor& tensor, bool requires_gradient,
    bool has_equal_sizes) {
  auto* own = dynamic_cast<MonitoredGroup*>(group.get());
  if (own == nullptr) return;
  auto call = describe_call(CollectiveKind::Differentiable, tensor, requires_gradient ? 1 : 0);
  if (!has_equal_sizes) call.numel = 0;
  own->record(call, tensor.device().type());
}

// Chooses the device as c10d does, and where that is the CPU, without a backend for it, one that
// has a backend.
WorkPtr MonitoredGroup::barrier(const c10d::BarrierOptions& o) {
  const auto device = o.device                                ? o.device->type()
                      : getBackendType() == BackendType::NCCL ? c10::kCUDA
                                                              : barrier_device(*this).type();
  RECORD_FUNCTION(dispatcher_name(OpType::BARRIER), c10::ArrayRef<const c10::IValue>());
  const auto number = log_call("barrier", {}, /*peer=*/-1);
  auto work = recorded(
      describe_call(Kind::Barrier, {}), device, [&] { return getBackend(device)->barrier(o); });
  if (number > 0) CallLog::active()->set_handle(work.get(), number);
  return work;
}

WorkPtr MonitoredGroup::start_message(
    const char* dispatcher_name, const char* kind, const Tensors& tensors, int peer, int tag,
    c10::function_ref<WorkPtr(c10d::Backend&)> start) {
  check_in_use();
  DDP_CHECK_VALUE(
      tensors.size() == 1, "send, recv: expected one tensor, got ", tensors.size(), " ",
      on_rank_text(*this), ". Call it once for each.");
  auto& backend = *serving(tensors[0].device().type()).backend;
  ++started_calls;
  RECORD_FUNCTION(dispatcher_name, std::vector<c10::IValue>{tensors[0]});
  const auto number = log_call(kind, tensors, peer, tag);
  WorkPtr work;
  {
    const MemoryScope of_backend(MemoryKind::Uncounted);
    work = start(backend);
  }
  if (number > 0) CallLog::active()->set_handle(work.get(), number);
  return watched(
      std::move(work), describe_call(Kind::Message, tensors), tensors[0].device().type(),
      /*is_single_message=*/true);
}

WorkPtr MonitoredGroup::send(Tensors& t, int dst, int tag) {
  return start_message(
      "c10d::send", "send", t, dst, tag, [&](auto& to) { return to.send(t, dst, tag); });
}

WorkPtr MonitoredGroup::recv(Tensors& t, int src, int tag) {
  return start_message(
      "c10d::recv_", "recv", t, src, tag, [&](auto& from) { return from.recv(t, src, tag); });
}

WorkPtr MonitoredGroup::recvAnysource(Tensors& t, int tag) {
  return start_message("c10d::recv_any_source_", "recv", t, /*peer=*/-1, tag, [&](auto& from) {
    return from.recvAnysource(t, tag);
  });
}

WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers, WaitOn wait_on) {
  const auto where = [name] { return std::string(name); };
  return start_monitored(where, group, device, start, peers, wait_on);
}

WorkPtr monitored(
    std::function<std::string()> where, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers) {
  return start_monitored(std::move(where), group, device, start, peers, WaitOn::Stream);
}

WorkPtr monitored_message(
    bool sends, std::optional<int> peer, int tag, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start) {
  const auto monitor = own_monitor_of(group);
  if (monitor && peer) peer = monitor->job_rank(*peer);
  const auto where = [sends, peer, tag] { return message_place(sends, peer, tag); };
  return start_monitored(where, group, device, start, Peers::Some, WaitOn::Stream);
}

}  // namespace ddp
