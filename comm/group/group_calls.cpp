// How a MonitoredGroup starts collectives, and ends.
#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/collective_backend.h>
#include <ddp/internal/before_shutdown.h>
#include <ddp/internal/check.h>
#include <ddp/internal/current_stream.h>
#include <ddp/internal/differentiable_call.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/rank_text.h>

#include "base/executor.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

using Base = c10d::ProcessGroup;

constexpr Deadline::Milliseconds kDeviceAbortTimeout{3000};

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

}  // namespace

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

using WorkPtr = MonitoredGroup::WorkPtr;

c10::intrusive_ptr<MonitoredGroup> MonitoredGroup::make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  auto group = c10::make_intrusive<MonitoredGroup>(store, rank, size);
  group->self_ = c10::intrusive_ptr<Base>(group);
  return group;
}

void MonitoredGroup::check_in_use() const {
  owner_.check("process group");
  DDP_CHECK(
      !is_shut_down_,
      "process group: expected one that is in use, got one that was destroyed on rank ", getRank(),
      " of ", getSize(), ". Make a new group, and a new wrapper of the module over it.");
}

WorkPtr MonitoredGroup::run(Collective c) {
  const auto device = c.first().device().type();
  RECORD_FUNCTION(dispatcher_name(c.type), dispatcher_tensors(c));
  return recorded(
      c.described(), device, [&] { return run_on(*serving(device).backend, std::move(c)); });
}

void MonitoredGroup::refused(Kind kind, const std::exception& error) {
  if (getSize() == 1 || !monitor_ || !owner_.is_this_one()) return;
  monitor_->fail(ddp::str(
      to_text(kind), " could not be started on ", monitor_->rank_text(), ": ", text_of(error)));
}

WorkPtr MonitoredGroup::recorded(
    const CollectiveCall& call, c10::DeviceType device, c10::function_ref<WorkPtr()> start) {
  check_in_use();
  if (getSize() == 1) return start();
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

WorkPtr MonitoredGroup::watched(WorkPtr work, const CollectiveCall& call, c10::DeviceType device) {
  const auto& devices = stream_devices_;
  const bool on_stream = std::find(devices.begin(), devices.end(), device) != devices.end();
  if (work && monitor_ && on_stream && !is_capturing(c10::Device(device))) {
    monitor_->watch(*work, call);
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
  return recorded(
      describe_call(Kind::Barrier, {}), device, [&] { return getBackend(device)->barrier(o); });
}

WorkPtr MonitoredGroup::start_message(
    const char* dispatcher_name, const Tensors& tensors,
    c10::function_ref<WorkPtr(c10d::Backend&)> start) {
  check_in_use();
  DDP_CHECK_VALUE(
      tensors.size() == 1, "send, recv: expected one tensor, got ", tensors.size(), " ",
      on_rank_text(*this), ". Call it once for each.");
  auto& backend = *serving(tensors[0].device().type()).backend;
  RECORD_FUNCTION(dispatcher_name, std::vector<c10::IValue>{tensors[0]});
  return watched_message(start(backend), tensors);
}

WorkPtr MonitoredGroup::send(Tensors& t, int dst, int tag) {
  return start_message("c10d::send", t, [&](auto& to) { return to.send(t, dst, tag); });
}

WorkPtr MonitoredGroup::recv(Tensors& t, int src, int tag) {
  return start_message("c10d::recv_", t, [&](auto& from) { return from.recv(t, src, tag); });
}

WorkPtr MonitoredGroup::recvAnysource(Tensors& t, int tag) {
  return start_message(
      "c10d::recv_any_source_", t, [&](auto& from) { return from.recvAnysource(t, tag); });
}

void MonitoredGroup::shutdown() {
  if (!owner_.is_this_one() || is_shut_down_.exchange(true)) return;
  if (!stream_devices_.empty()) run_before_shutdown();
  stream_devices_.empty() || getSize() == 1 || !monitor_ ? Base::shutdown() : finish();
}

/// Shuts the backends down after their collectives, or aborts those of devices if these cannot end.
void MonitoredGroup::finish() {
  try {
    monitor_->check();
    finish_on_device();
  } catch (const std::exception&) {
    abort_on_device();  // the job has failed
  }
  for (const auto& device : getDeviceTypes()) {
    const bool on_stream =
        std::count(stream_devices_.begin(), stream_devices_.end(), device.type()) > 0;
    if (!on_stream) getBackend(device.type())->shutdown();
  }
}

/// On a thread that is abandoned if it lasts: NCCL's abort may wait for other work of the device.
void MonitoredGroup::abort_on_device() {
  Executor executor;
  for (const auto device : stream_devices_) {
    executor.push([backend = getBackend(device)] { problem_of([&] { backend->abort(); }); });
  }
  executor.close(kDeviceAbortTimeout);
}

/// \throws c10::DistBackendError  if another rank has failed, or is late: the job has failed then.
void MonitoredGroup::finish_on_device() {
  const auto where = [] { return std::string("ending the process group"); };
  monitor_->wait_for_device(where);
  Executor executor;
  std::vector<std::future<void>> ends;
  for (const auto device : stream_devices_) {
    const auto end = std::make_shared<std::packaged_task<void()>>(
        [backend = getBackend(device)] { backend->shutdown(); });
    ends.push_back(end->get_future());
    executor.push([end] { (*end)(); });
  }
  try {
    for (auto& end : ends) {
      monitor_->wait_until(
          [&](auto at_most) { return end.wait_for(at_most) == std::future_status::ready; }, where);
      end.get();
    }
  } catch (const std::exception&) {
    executor.close(Deadline::Milliseconds(0));
    throw;
  }
}

void MonitoredGroup::abort() {
  if (owner_.is_this_one()) Base::abort();
}

void MonitoredGroup::release_resources() {
  if (!owner_.is_this_one()) return;
  if (monitor_) {
    if (std::uncaught_exceptions() > 0) {
      monitor_->leave_by_exception();
    } else if (!stream_devices_.empty()) {
      shutdown();
    }
    monitor_->leave_job();
  }
  Base::release_resources();
  // Weak references keep the object, and what it had: listening sockets and the history of calls.
  recipe_ = {};
  monitor_.reset();
  self_.reset();
}

}  // namespace ddp
