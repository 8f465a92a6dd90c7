#include "group/monitored_call.h"

#include <functional>
#include <string>
#include <utility>

#include <ddp/internal/capabilities.h>
#include <ddp/internal/text.h>

#include "group/monitored_group.h"
#include "monitor/rank_report.h"

namespace ddp {
namespace {

WorkPtr start_monitored(
    std::function<std::string()> where, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers, WaitOn wait_on) {
  const auto monitor = own_monitor_of(group);
  if (!monitor || group.getSize() == 1) return handle_of(start());
  StartedCall call;
  const auto doing = [&] { return ddp::str("starting ", where()); };
  monitor->abort_on_error(doing, [&] { call = start(); });
  CallWatch watch{monitor, std::move(where)};
  watch.on_stream = wait_on == WaitOn::Stream && capabilities_of(group, device).waits_on_stream;
  watch.peers = peers;
  watch.group = ProcessGroup::unsafe_reclaim_from_nonowning(&group);
  return c10::make_intrusive<CollectiveHandle>(std::move(call), std::move(watch));
}

}  // namespace

WorkPtr monitored(
    const char* name, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start, Peers peers, WaitOn wait_on) {
  const auto where = [name] { return std::string(name); };
  return start_monitored(where, group, device, start, peers, wait_on);
}

WorkPtr monitored_message(
    bool sends, int peer, int tag, c10d::ProcessGroup& group, c10::Device device,
    c10::function_ref<StartedCall()> start) {
  const auto monitor = own_monitor_of(group);
  if (monitor) peer = monitor->job_rank(peer);
  const auto where = [sends, peer, tag] { return message_place(sends, peer, tag); };
  return start_monitored(where, group, device, start, Peers::Some, WaitOn::Stream);
}

}  // namespace ddp
