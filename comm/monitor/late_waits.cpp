#include "monitor/late_waits.h"

#include <iterator>

#include <c10/util/Exception.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "monitor/failure_records.h"

namespace ddp {
namespace {

// The store key of the rank that looks for all.
constexpr const char* kLooker = "looker";
// A second, less what two waits of half a second may be early.
constexpr std::chrono::milliseconds kLookEvery{900};

/// Sets `key` to `text` if its value is `expected` ("": unset, or ""). For a store of any class.
///
/// \return its value after that.
std::string compare_set(
    c10d::Store& store, const std::string& key, const std::string& expected,
    const std::string& text) {
  try {
    return store.compareSet(key, expected, text);
  } catch (const c10::NotImplementedError&) {
    // The store is of a class of the user's own: c10d's Store only has a stub. A value that another
    // rank sets in between is lost, until that rank asks again.
    auto current = store.check({key}) ? store.get_to_str(key) : "";
    if (current != expected) return current;
    store.set(key, text);
    return text;
  }
}

}  // namespace

LateWaits::LateWaits(int rank, int size, std::string address)
    : rank_(rank), size_(size), address_(std::move(address)) {
  published_ = to_text(make_report());
}

std::string LateWaits::list_name(const std::string& group, CallHistory::Lane lane) {
  return ddp::str(group, lane == CallHistory::Lane::kCpu ? " cpu" : " device");
}

void LateWaits::add_group(
    const std::string& key, const std::shared_ptr<const CallHistory>& calls,
    std::vector<int> job_ranks) {
  const std::lock_guard lock(mutex_);
  for (auto group = groups_.begin(); group != groups_.end();) {
    group = group->second.calls.expired() ? groups_.erase(group) : std::next(group);
  }
  groups_[key] = {calls, std::move(job_ranks)};
}

uint64_t LateWaits::begin(Wait wait, std::chrono::milliseconds late_for) {
  const std::lock_guard lock(mutex_);
  waits_[++waits_begun_] = {std::move(wait), std::this_thread::get_id(), Clock::now() - late_for};
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

void LateWaits::take_over() {
  const std::lock_guard lock(mutex_);
  takes_over_ = true;
}

void LateWaits::make_look_due() {
  const std::lock_guard lock(mutex_);
  next_look_ = {};
}

bool LateWaits::is_late() {
  const std::lock_guard lock(mutex_);
  return !waits_.empty();
}

/// While mutex_ is held, no thread of waits_ goes on to make a call.
BlockedRank LateWaits::describe_blocked() {
  BlockedRank blocked;
  const auto waits_late = [&](std::thread::id thread) {
    return any_of(waits_, [&](const auto& one) { return one.second.thread == thread; });
  };
  for (const auto& [key, group] : groups_) {
    const auto calls = group.calls.lock();
    if (!calls) continue;
    const auto progress = calls->progress();
    if (!all_of(progress.threads, waits_late)) return blocked;
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

/// The latest calls in the groups in which this rank waits.
std::vector<RankCalls> LateWaits::own_calls() {
  std::vector<RankCalls> all;
  const std::lock_guard lock(mutex_);
  std::map<std::string, const Wait*> latest;  // by group
  for (const auto& [_, entry] : waits_) latest[entry.wait.group] = &entry.wait;
  for (const auto& [key, wait] : latest) {
    const auto group = groups_.find(key);
    const auto calls = group == groups_.end() ? nullptr : group->second.calls.lock();
    if (!calls) continue;
    for (const auto lane : CallHistory::kLanes) {
      RankCalls own{rank_,       list_name(key, lane), wait->group_name, wait->where,
                    wait->steps, wait->steps_text,     calls->read(lane)};
      if (own.calls.calls.empty()) continue;
      for (auto& call : own.calls.calls) {
        if (call.root >= 0) call.root = group->second.job_ranks.at(static_cast<size_t>(call.root));
      }
      all.push_back(std::move(own));
    }
  }
  return all;
}

void LateWaits::publish(c10d::Store& store) {
  auto report = make_report();
  const auto calls = to_text(own_calls());
  report.calls = calls.empty() ? 0 : fnv1a(calls);
  auto text = to_text(report);
  if (text != published_) {
    if (report.calls != 0 && report.calls != std::exchange(published_calls_, report.calls)) {
      store.set(calls_key(rank_), calls);
    }
    store.set(report_key(rank_), text);
    published_ = std::move(text);
  }
  if (report.where.empty() && looks_for_all_) {
    compare_set(store, kLooker, ddp::str(rank_), "");
    looks_for_all_ = false;
    calls_.clear();
    seen_.clear();
  }
}

/// Whether this rank has the part, or gets it because no rank has it. One that takes it over waits
/// for the next look: another rank may do so, too.
bool LateWaits::looks_for_all(c10d::Store& store) {
  const auto own = ddp::str(rank_);
  bool takes_over = false;
  {
    const std::lock_guard lock(mutex_);
    takes_over = std::exchange(takes_over_, false);
  }
  const auto current = compare_set(store, kLooker, "", own);
  if (current != own && takes_over) {
    compare_set(store, kLooker, current, own);
    return false;
  }
  return current == own;
}

void LateWaits::read_calls(c10d::Store& store, const std::vector<RankReport>& reports) {
  std::vector<int> changed;
  std::vector<std::string> keys;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    const auto hash = reports[static_cast<size_t>(rank)].calls;
    if (hash == 0) {
      calls_.erase(rank);
    } else if (calls_[rank].first != hash) {
      calls_[rank].first = hash;
      changed.push_back(rank);
      keys.push_back(calls_key(rank));
    }
  }
  if (keys.empty()) return;
  const auto values = store.multiGet(keys);
  for (size_t i = 0; i < changed.size(); ++i) {
    calls_[changed[i]].second = parse_calls(changed[i], {values[i].begin(), values[i].end()});
  }
}

std::optional<std::string> LateWaits::look(c10d::Store& store) {
  publish(store);
  if (!is_late()) return std::nullopt;
  looks_for_all_ = looks_for_all(store);
  if (!looks_for_all_) return std::nullopt;
  const auto reports = read_reports(store, numbers_up_to(size_));
  read_calls(store, reports);
  std::vector<RankCalls> calls;
  for (const auto& [_, of_rank] : calls_) {
    calls.insert(calls.end(), of_rank.second.begin(), of_rank.second.end());
  }
  if (const auto difference = find_call_difference(calls)) {
    return record_failure(store, to_text(*difference));
  }
  if (const auto deadlock = find_cycle(reports)) return record_failure(store, *deadlock);
  return std::nullopt;
}

/// \return the text of a cycle that was there in the last look, too, and in which no rank has
/// moved.
std::optional<std::string> LateWaits::find_cycle(const std::vector<RankReport>& reports) {
  std::vector<BlockedRank> blocked;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].blocked.waits.empty()) continue;
    blocked.push_back(reports[rank].blocked);
    blocked.back().rank = static_cast<int>(rank);
  }
  const auto cycle = find_wait_cycle(blocked);
  std::vector<std::pair<int, std::string>> found;
  for (const auto& wait : cycle) {
    found.emplace_back(wait.rank, to_text(reports[static_cast<size_t>(wait.rank)]));
  }
  const bool again = !found.empty() && found == seen_;
  seen_ = std::move(found);
  return again ? std::optional<std::string>(to_text(cycle)) : std::nullopt;
}

}  // namespace ddp
