#include "group/monitored_group.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/executor.h"
#include "monitor/flight_record.h"
#include "monitor/job_monitor.h"
#include "monitor/rank_report.h"
#include "store/store_clone.h"

namespace ddp {
namespace {

/// The devices of the group's backends that wait on streams.
std::vector<c10::DeviceType> find_stream_devices(c10d::ProcessGroup& group) {
  std::vector<c10::DeviceType> found;
  for (const auto& device : group.getDeviceTypes()) {
    if (capabilities_of(group, device).waits_on_stream) found.push_back(device.type());
  }
  return found;
}

bool report_results(c10d::ProcessGroup& group, const std::vector<c10::DeviceType>& devices) {
  return !devices.empty() &&
         std::all_of(devices.begin(), devices.end(), [&](c10::DeviceType device) {
           return capabilities_of(group, device).reports_results;
         });
}

using AnyStore = c10::intrusive_ptr<c10d::Store>;

// Returns c10d's default if the group's backend does not report a timeout.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::chrono::minutes(30);
  }
}

// An abort may run on another thread while the group is destroyed.
std::function<void()> aborting(const ProcessGroup& group) {
  return [weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)] {
    if (const auto alive = weak.lock()) alive->abort();
  };
}

}  // namespace

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
  setup.calls = calls_;
  setup.group_name = getGroupName();
  setup.coordinate = recipe_.coordinate;
  monitor_ = std::make_shared<GroupMonitor>(std::move(setup));
  add_to_flight_record(monitor_);
}

/// Once, because each call of a collective asks for them.
void MonitoredGroup::find_backends() {
  for (const auto& device : getDeviceTypes()) {
    const auto named = registered_names_.find(device.type());
    served_[device.type()] = backends::served(
        getBackend(device.type()), named == registered_names_.end() ? "" : named->second);
  }
}

const backends::ServedBackend& MonitoredGroup::serving(c10::DeviceType device) const {
  const auto found = served_.find(device);
  DDP_CHECK(
      found != served_.end(), "process group: expected a tensor of a device that it has a backend ",
      "for, got one of ", device, " ", on_rank_text(*this),
      ". Name a backend for it: backend(\"cpu:gloo,cuda:nccl\").");
  return found->second;
}

std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group) {
  const auto* monitored = dynamic_cast<const MonitoredGroup*>(&group);
  return monitored ? monitored->monitor() : nullptr;
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

}  // namespace ddp
