#include "monitor/waits/late_waits.h"

#include <algorithm>
#include <iterator>

#include <ddp/internal/text.h>

#include "monitor/failure_records.h"
#include "monitor/job_monitor.h"
#include "store/compare_set.h"

namespace ddp {
namespace {

// The store key of the rank that looks for all.
constexpr const char* kLooker = "looker";
// A second, less what two waits of half a second may be early.
constexpr std::chrono::milliseconds kLookEvery{900};

std::string text_of_bytes(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

LateWaits::LateWaits(int rank, int size, std::string address)
    : rank_(rank), size_(size), address_(std::move(address)) {
  published_ = to_text(make_report());
}

std::string LateWaits::list_name(const std::string& group, CallHistory::Lane lane) {
  return ddp::str(group, lane == CallHistory::Lane::kCpu ? " cpu" : " device");
}

void LateWaits::add_group(const std::string& key, const std::shared_ptr<const CallHistory>& calls) {
  const std::lock_guard lock(mutex_);
  for (auto group = groups_.begin(); group != groups_.end();) {
    group = group->second.expired() ? groups_.erase(group) : std::next(group);
  }
  groups_[key] = calls;
}

uint64_t LateWaits::begin(Wait wait) {
  const std::lock_guard lock(mutex_);
  waits_[++waits_begun_] = {std::move(wait), std::this_thread::get_id(), Clock::now()};
  next_look_ = {};
  return waits_begun_;
}

void LateWaits::end(uint64_t number) {
  const std::lock_guard lock(mutex_);
  waits_.erase(number);
}

std::chrono::milliseconds LateWaits::reported_for() {
  const std::lock_guard lock(mutex_);
  for (const auto& [_, entry] : waits_) {  // by the order of their begins
    if (entry.thread != std::this_thread::get_id()) continue;
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - entry.since);
  }
  return {};
}

bool LateWaits::is_look_due() {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  if (waits_.empty() || now < next_look_) return false;
  next_look_ = now + kLookEvery;
  return true;
}

/// While mutex_ is held, no thread of waits_ goes on to make a call.
BlockedRank LateWaits::describe_blocked() {
  BlockedRank blocked;
  const auto waits_late = [&](std::thread::id thread) {
    return std::any_of(
        waits_.begin(), waits_.end(), [&](const auto& one) { return one.second.thread == thread; });
  };
  for (const auto& [key, group] : groups_) {
    const auto calls = group.lock();
    if (!calls) continue;
    const auto progress = calls->progress();
    const auto& threads = progress.threads;
    if (!std::all_of(threads.begin(), threads.end(), waits_late)) return blocked;
    for (const auto lane : CallHistory::kLanes) {
      blocked.made[list_name(key, lane)] = progress.counts[static_cast<size_t>(lane)];
    }
  }
  for (const auto& [_, entry] : waits_) {
    if (!entry.wait.call) {
      blocked.waits.clear();
      return blocked;
    }
    blocked.waits.push_back(*entry.wait.call);
  }
  return blocked;
}

RankReport LateWaits::make_report() {
  RankReport report;
  report.address = address_;
  const std::lock_guard lock(mutex_);
  if (waits_.empty()) return report;
  const auto& latest = waits_.rbegin()->second.wait;
  report.group = latest.group;
  report.group_name = latest.group_name;
  report.where = latest.where;
  report.steps = latest.steps;
  report.blocked = describe_blocked();
  return report;
}

bool LateWaits::publish(c10d::Store& store) {
  const auto report = make_report();
  const bool is_blocked = !report.blocked.waits.empty();
  auto text = to_text(report);
  if (text != published_) {
    store.set(JobMonitor::report_key(rank_), std::vector<uint8_t>(text.begin(), text.end()));
    published_ = std::move(text);
  }
  if (!is_blocked && looks_for_all_) {
    compare_set(store, kLooker, ddp::str(rank_), "");
    looks_for_all_ = false;
    seen_.clear();
  }
  return is_blocked;
}

std::optional<std::string> LateWaits::look(c10d::Store& store) {
  if (!publish(store)) return std::nullopt;
  const auto own = ddp::str(rank_);
  looks_for_all_ = looks_for_all_ || compare_set(store, kLooker, "", own) == own;
  if (!looks_for_all_) return std::nullopt;
  std::vector<std::string> keys, texts;
  for (int rank = 0; rank < size_; ++rank) keys.push_back(JobMonitor::report_key(rank));
  std::vector<BlockedRank> blocked;
  for (const auto& value : store.multiGet(keys)) {
    texts.push_back(text_of_bytes(value));
    auto report = parse_report(texts.back());
    report.blocked.rank = static_cast<int>(texts.size()) - 1;
    if (!report.blocked.waits.empty()) blocked.push_back(std::move(report.blocked));
  }
  const auto cycle = find_wait_cycle(blocked);
  std::vector<std::pair<int, std::string>> found;
  for (const auto& wait : cycle) {
    found.emplace_back(wait.rank, texts.at(static_cast<size_t>(wait.rank)));
  }
  const bool again = !found.empty() && found == seen_;
  seen_ = std::move(found);
  if (!again) return std::nullopt;
  return record_failure(store, to_text(cycle));
}

}  // namespace ddp
