// What a rank reports of a late wait in a group.
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "calls/call_history.h"
#include "calls/work_parts.h"
#include "monitor/job_monitor.h"
#include "monitor/waits/late_waits.h"

namespace ddp {
namespace {

using Kind = CollectiveKind;

std::optional<CallHistory::Position> find_call(const CallHistory& calls, const c10d::Work* work) {
  if (auto found = calls.find(work)) return found;
  const auto* whole = dynamic_cast<const WorkParts*>(work);
  if (whole == nullptr) return std::nullopt;
  // The last part: a rank that has not come to one before has not come to it, either.
  for (auto part = whole->parts().rbegin(); part != whole->parts().rend(); ++part) {
    if (auto found = find_call(calls, part->get())) return found;
  }
  return std::nullopt;
}

// The rank of the group without whose call `rank` waits, or AwaitedCall::kAll. Nothing if `rank`
// may go on without the others.
std::optional<int> needed_rank(const CallHistory::Position& at, int rank) {
  const auto& [lane, _, call] = at;
  const bool is_root = call.root == rank;
  switch (call.kind) {
    case Kind::kBroadcast:
    case Kind::kScatter:
      return is_root ? std::nullopt : std::optional<int>(call.root);
    case Kind::kReduce:
    case Kind::kGather:
      return is_root ? std::optional<int>(AwaitedCall::kAll) : std::nullopt;
    case Kind::kAllToAll:
      // NCCL does not wait for a rank that sends nothing.
      return lane == CallHistory::Lane::kCpu ? std::optional<int>(AwaitedCall::kAll) : std::nullopt;
    default:
      return AwaitedCall::kAll;
  }
}

}  // namespace

/// \return  nothing if others than ranks that make calls may end the wait.
std::optional<AwaitedCall> GroupMonitor::awaited_call(
    const std::string& where, const c10d::Work* work) const {
  if (!setup_.calls || work == nullptr) return std::nullopt;
  const auto at = find_call(*setup_.calls, work);
  const auto needed = at ? needed_rank(*at, setup_.rank) : std::nullopt;
  if (!needed) return std::nullopt;
  auto call = at->call;
  if (call.root >= 0) call.root = job_rank(call.root);
  const bool names_call = where == to_text(call.kind);
  return AwaitedCall{
      LateWaits::list_name(setup_.key, at->lane), at->number,
      *needed == AwaitedCall::kAll ? *needed : job_rank(*needed),
      ddp::str(
          rank_text(), " waits in call ", at->number, " of process group \"", setup_.group_name,
          "\" (", to_text(call), names_call ? "" : ", in " + where, ")")};
}

/// \param work  the handle that is waited for; null: unknown.
uint64_t GroupMonitor::begin_late_wait(const std::string& where, const c10d::Work* work) {
  return setup_.job->late_waits().begin(
      {setup_.key, where, count_steps(), awaited_call(where, work), setup_.group_name});
}

}  // namespace ddp
