#include "group/monitored_group.h"

#include <algorithm>
#include <exception>
#include <future>
#include <mutex>
#include <utility>

#include <ddp/internal/call_log.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/executor.h"
#include "monitor/flight_record.h"
#include "monitor/job_monitor.h"
#include "monitor/rank_report.h"
#include "store/bounded_store.h"

namespace ddp {
namespace {

using Base = c10d::ProcessGroup;

constexpr Deadline::Milliseconds kDeviceAbortTimeout{3000};

/// The devices of the group's backends that wait on streams.
std::vector<c10::DeviceType> find_stream_devices(c10d::ProcessGroup& group) {
  std::vector<c10::DeviceType> found;
  for (const auto& device : group.getDeviceTypes()) {
    if (capabilities_of(group, device).waits_on_stream) found.push_back(device.type());
  }
  return found;
}

bool report_results(c10d::ProcessGroup& group, const std::vector<c10::DeviceType>& devices) {
  return !devices.empty() && all_of(devices, [&](c10::DeviceType device) {
    return capabilities_of(group, device).reports_results;
  });
}

using AnyStore = c10::intrusive_ptr<c10d::Store>;

// An abort may run on another thread while the group is destroyed.
std::function<void()> aborting(const ProcessGroup& group) {
  return [weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)] {
    if (const auto alive = weak.lock()) alive->abort();
  };
}

using Act = std::function<void()>;

struct Acts {
  std::mutex mutex;
  std::vector<std::weak_ptr<Act>> acts;
};

Acts& all_acts() {
  static Acts instance;
  return instance;
}

}  // namespace

c10::intrusive_ptr<MonitoredGroup> MonitoredGroup::make(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  auto group = c10::make_intrusive<MonitoredGroup>(store, rank, size);
  group->self_ = c10::intrusive_ptr<Base>(group);
  return group;
}

void MonitoredGroup::start_monitor(GroupRecipe recipe, const std::string& key) {
  recipe_ = std::move(recipe);
  key_ = key;
  GroupMonitor::Setup setup;
  setup.rank = getRank();
  setup.size = getSize();
  setup.timeout = recipe_.timeout;
  setup.job = recipe_.job;
  setup.job_ranks = recipe_.world_ranks;
  setup.key = key;
  setup.abort_backends = aborting(ddp::ProcessGroup::unsafe_reclaim_from_nonowning(this));
  find_backends();
  stream_devices_ = find_stream_devices(*this);
  setup.has_streams = !stream_devices_.empty();
  setup.reports_results = report_results(*this, stream_devices_);
  setup.serializes_messages = recipe_.device_id && any_of(stream_devices_, [this](auto device) {
                                return backend_name(device) == "nccl";
                              });
  setup.calls = calls_;
  setup.group_name = getGroupName();
  setup.coordinate = recipe_.coordinate;
  monitor_ = std::make_shared<GroupMonitor>(std::move(setup));
  add_to_flight_record(monitor_);
  auto* const log = CallLog::active();
  if (log && getSize() > 1) {
    number_in_log_ = log->add_group(getGroupName(), recipe_.axis, recipe_.world_ranks);
  }
}

/// Once, because each call of a collective asks for them.
void MonitoredGroup::find_backends() {
  for (const auto& device : getDeviceTypes()) {
    const auto named = registered_names_.find(device.type());
    served_[device.type()] = backends::served(
        getBackend(device.type()), named == registered_names_.end() ? "" : named->second);
  }
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
  // Weak references keep the object, and what it had: backends with their threads and connections,
  // listening sockets and the history of calls.
  served_.clear();
  recipe_ = {};
  monitor_.reset();
  self_.reset();
}

std::shared_ptr<GroupMonitor> monitor_of(const ProcessGroup& group) {
  if (auto own = own_monitor_of(*group)) return own;
  JobMonitor::Setup job;
  job.rank = group->getRank();
  job.size = group->getSize();
  if (job.size > 1 && group->getStore()) {
    const auto prefix = ddp::str("ddp/monitor/", group->getGroupName(), "/");
    const auto join = [prefix, rank = job.rank, store = group->getStore()]() -> AnyStore {
      const auto count = store->add(ddp::str(prefix, "made/", rank), 1);
      const auto report = ddp::str(prefix, count, "/", report_key(rank));
      store->set(report, std::vector<uint8_t>{'\t'});
      return c10::make_intrusive<c10d::PrefixStore>(ddp::str(prefix, count), clone_of(store));
    };
    const auto joined = bounded_call(join, Deadline::in(group->getStore()->getTimeout()));
    DDP_CHECK_WITH(
        DistStoreError, joined, "process group: expected the store to answer within ",
        group->getStore()->getTimeout().count(), " ms, got no answer on rank ", job.rank, " of ",
        job.size, ". Look for the process that hosts the store.");
    job.store = *joined;
  }
  GroupMonitor::Setup setup;
  setup.rank = job.rank;
  setup.size = job.size;
  setup.timeout = timeout_of(*group);
  setup.has_streams = !find_stream_devices(*group).empty();
  setup.job = std::make_shared<JobMonitor>(std::move(job));
  setup.abort_backends = aborting(group);
  return std::make_shared<GroupMonitor>(std::move(setup));
}

std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::chrono::minutes(30);
  }
}

std::optional<int64_t> count_common_ranks(
    const c10d::ProcessGroup& a, const c10d::ProcessGroup& b) {
  if (&a == &b) return a.getSize();
  const auto* one = dynamic_cast<const MonitoredGroup*>(&a);
  const auto* other = dynamic_cast<const MonitoredGroup*>(&b);
  if (!one || !other || one->recipe().job != other->recipe().job) return std::nullopt;
  const auto& ranks = one->recipe().world_ranks;
  return count_if(ranks, [&](int rank) { return contains(other->recipe().world_ranks, rank); });
}

std::shared_ptr<void> call_before_shutdown(std::function<void()> act) {
  auto handle = std::make_shared<Act>(std::move(act));
  auto& all = all_acts();
  const std::lock_guard lock(all.mutex);
  all.acts.push_back(handle);
  return handle;
}

void run_before_shutdown() {
  std::vector<std::shared_ptr<Act>> alive;
  auto& all = all_acts();
  {
    const std::lock_guard lock(all.mutex);
    std::vector<std::weak_ptr<Act>> kept;
    for (const auto& act : all.acts) {
      if (auto one = act.lock()) {
        alive.push_back(std::move(one));
        kept.push_back(act);
      }
    }
    all.acts = std::move(kept);
  }
  for (const auto& act : alive) (*act)();
}

}  // namespace ddp
