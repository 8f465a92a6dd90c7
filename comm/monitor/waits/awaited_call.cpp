// What a rank reports of a late wait in a group.
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "calls/call_history.h"
#include "monitor/job_monitor.h"
#include "monitor/waits/late_waits.h"

namespace ddp {
namespace {

using Kind = CollectiveKind;

// The rank of the group without whose call `rank` waits, or AwaitedCall::kAll. Nothing if `rank`
// may go on without the others.
std::optional<int> needed_rank(const CallHistory::Position& at, int rank) {
  const auto& [lane, _, call] = at;
  const bool is_root = call.root == rank;
  switch (call.kind) {
    case Kind::Broadcast:
    case Kind::Scatter:
      return is_root ? std::nullopt : std::optional<int>(call.root);
    case Kind::Reduce:
    case Kind::Gather:
      return is_root ? std::optional<int>(AwaitedCall::kAll) : std::nullopt;
    case Kind::AllToAll:
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
  const auto at = setup_.calls->find(work);
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
