// How a MonitoredGroup starts collectives, and ends.
#include <algorithm>
#include <exception>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
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

WorkPtr MonitoredGroup::start_described(
    const CollectiveCall& call, c10::DeviceType device, Start start) {
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
      std::move(work), describe_call(Kind::kMessage, tensors), tensors[0].device().type());
}

void MonitoredGroup::record(const CollectiveCall& call, c10::DeviceType device) {
  if (getSize() > 1) calls_->add(CallHistory::lane_of(device), call);
}

void record_differentiable_call(
    const ProcessGroup& group, const at::Tensor& tensor, bool requires_gradient,
    bool has_equal_sizes) {
  auto* own = dynamic_cast<MonitoredGroup*>(group.get());
  if (own == nullptr) return;
  auto call = describe_call(CollectiveKind::kDifferentiable, tensor, requires_gradient ? 1 : 0);
  if (!has_equal_sizes) call.numel = 0;
  own->record(call, tensor.device().type());
}

WorkPtr MonitoredGroup::DDP_GROUP_ALL_GATHER_SINGLE(
    at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& o) {
  return start(
      Kind::kAllGather, to, [&] { return Base::DDP_GROUP_ALL_GATHER_SINGLE(to, from, o); });
}

WorkPtr MonitoredGroup::DDP_GROUP_REDUCE_SCATTER_SINGLE(
    at::Tensor& to, at::Tensor& from, const c10d::ReduceScatterOptions& o) {
  const auto call = [&] { return Base::DDP_GROUP_REDUCE_SCATTER_SINGLE(to, from, o); };
  return start(Kind::kReduceScatter, from, call, o.reduceOp.op_);
}

WorkPtr MonitoredGroup::DDP_GROUP_ALL_TO_ALL_SINGLE(
    at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_splits,
    std::vector<int64_t>& from_splits, const c10d::AllToAllOptions& o) {
  return start(Kind::kAllToAll, from, [&] {
    return Base::DDP_GROUP_ALL_TO_ALL_SINGLE(to, from, to_splits, from_splits, o);
  });
}

// Calls the backend, which needs no tensor: c10d::ProcessGroup makes one in a static variable,
// which is a data race for ranks that are threads of one process. Chooses the device as c10d does,
// and where that is the CPU, without a backend for it, one that has a backend.
WorkPtr MonitoredGroup::barrier(const c10d::BarrierOptions& o) {
  const auto device = o.device                                ? o.device->type()
                      : getBackendType() == BackendType::NCCL ? c10::kCUDA
                                                              : barrier_device(*this).type();
  return start_described(
      describe_call(Kind::kBarrier, {}), device, [&] { return getBackend(device)->barrier(o); });
}

WorkPtr MonitoredGroup::send(Tensors& tensors, int dst, int tag) {
  check_in_use();
  return watched_message(Base::send(tensors, dst, tag), tensors);
}

WorkPtr MonitoredGroup::recv(Tensors& tensors, int src, int tag) {
  check_in_use();
  return watched_message(Base::recv(tensors, src, tag), tensors);
}

WorkPtr MonitoredGroup::recvAnysource(Tensors& tensors, int tag) {
  check_in_use();
  return watched_message(Base::recvAnysource(tensors, tag), tensors);
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
