#include "group/monitored_group.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "monitor/flight_record.h"
#include "monitor/liveness_socket.h"
#include "store/store_executor.h"

namespace ddp {
namespace {

std::vector<uint8_t> report_of(const std::string& address) {
  const auto text = address + '\t';
  return {text.begin(), text.end()};
}

std::string address_in(const std::vector<uint8_t>& report) {
  const std::string text(report.begin(), report.end());
  return text.substr(0, text.find('\t'));
}

bool has_streams(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [&](const c10::Device& device) {
    return capabilities_of(group, device).waits_on_stream;
  });
}

using AnyStore = c10::intrusive_ptr<c10d::Store>;

// Returns the store itself if it cannot be cloned.
AnyStore clone_of(const AnyStore& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

// Returns c10d's default if the group's backend does not report a timeout.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::chrono::minutes(30);
  }
}

}  // namespace

void MonitoredGroup::on_last_reference() {
  if (!monitor_) return;
  if (std::uncaught_exceptions() > 0) monitor_->leave_by_exception();
  monitor_->wait_until_failure_is_read();
}

void MonitoredGroup::start_monitor(
    GroupRecipe recipe, const c10::intrusive_ptr<BoundedStore>& store) {
  recipe_ = std::move(recipe);
  const auto& ranks = recipe_.world_ranks;
  const auto host = std::find(ranks.begin(), ranks.end(), recipe_.store_host);
  GroupMonitor::Setup setup;
  setup.rank = getRank();
  setup.size = getSize();
  setup.timeout = recipe_.timeout;
  setup.has_streams = has_streams(*this);
  setup.calls = calls();
  setup.group_name = getGroupName();
  if (setup.size > 1) {
    setup.store = store->unbounded();  // the monitor's thread may be abandoned
    if (host != ranks.end()) setup.store_host = static_cast<int>(host - ranks.begin());
    setup.liveness = std::make_shared<LivenessSocket>(recipe_.gloo_devices);
    std::vector<std::string> keys;
    for (int rank = 0; rank < setup.size; ++rank) keys.push_back(GroupMonitor::report_key(rank));
    const auto own = static_cast<size_t>(setup.rank);
    store->set(keys[own], report_of(setup.liveness->address()));
    for (const auto& report : store->multiGet(keys)) setup.addresses.push_back(address_in(report));
    setup.abort_backends = [this] { abort(); };
  }
  setup.world_rank = ranks[static_cast<size_t>(setup.rank)];
  monitor_ = std::make_shared<GroupMonitor>(std::move(setup));
  add_to_flight_record(monitor_);
}

std::shared_ptr<GroupMonitor> own_monitor_of(c10d::ProcessGroup& group) {
  const auto* monitored = dynamic_cast<const MonitoredGroup*>(&group);
  return monitored ? monitored->monitor() : nullptr;
}

std::shared_ptr<GroupMonitor> monitor_of(const ProcessGroup& group) {
  if (auto own = own_monitor_of(*group)) return own;
  GroupMonitor::Setup setup;
  setup.rank = group->getRank();
  setup.size = group->getSize();
  setup.timeout = timeout_of(*group);
  setup.has_streams = has_streams(*group);
  setup.abort_backends = [raw = group.get()] { raw->abort(); };
  if (setup.size > 1 && group->getStore()) {
    const auto prefix = ddp::str("ddp/monitor/", group->getGroupName(), "/");
    const auto join = [prefix, rank = setup.rank, all = group->getStore()](c10d::Store& store) {
      const auto count = store.add(ddp::str(prefix, "made/", rank), 1);
      store.set(ddp::str(prefix, count, "/", GroupMonitor::report_key(rank)), report_of(""));
      return c10::make_intrusive<c10d::PrefixStore>(ddp::str(prefix, count), clone_of(all));
    };
    const auto joined =
        StoreExecutor(group->getStore()).ask<AnyStore>(join, group->getStore()->getTimeout());
    DDP_CHECK_WITH(
        DistStoreError, joined, "process group: expected the store to answer within ",
        group->getStore()->getTimeout().count(), " ms, got no answer on rank ", setup.rank, " of ",
        setup.size, ". Look for the process that hosts the store.");
    setup.store = *joined;
  }
  return std::make_shared<GroupMonitor>(std::move(setup));
}

}  // namespace ddp
