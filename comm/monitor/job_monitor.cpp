#include "monitor/job_monitor.h"

#include <algorithm>
#include <condition_variable>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <ddp/elastic_errors.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "monitor/abort_calls.h"
#include "monitor/device_wait.h"
#include "monitor/failure_records.h"
#include "monitor/flight_record.h"
#include "monitor/late_waits.h"
#include "monitor/liveness_socket.h"
#include "store/bounded_store.h"
#include "store/exchange.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a failing rank waits for its backends to abort: NCCL's may block.
constexpr milliseconds kAbortTimeout{3000};
// How long a peer's host may take to accept a connection: the kernel sends again after 1 s.
constexpr milliseconds kConnecting{1500};

// Other ranks whose liveness is `state`.
std::vector<int> others_in(
    Liveness state, const std::vector<int>& ranks, const std::vector<Liveness>& found, int own) {
  std::vector<int> others;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != own && found[i] == state) others.push_back(ranks[i]);
  }
  return others;
}

}  // namespace

/// The latest answers of the store, shared with the store's thread.
struct JobMonitor::Answers {
  std::mutex mutex;  // guards the members below
  std::condition_variable answered;
  std::optional<std::string> failure;
  bool looks = false;  // in the next request to the store
  bool request_pending = false;
  bool generation_ended = false;  // and with it, perhaps, the store
  Clock::time_point requested_at{};
  std::string silent_error;  // the error of a store that did not answer in time
};

std::shared_ptr<JobMonitor> JobMonitor::connect(Setup setup, c10d::Store& bounded_store) {
  if (setup.size > 1) {
    std::vector<std::string> keys;
    for (int rank = 0; rank < setup.size; ++rank) keys.push_back(report_key(rank));
    RankReport own;
    if (setup.liveness) own.address = setup.liveness->address();
    const auto reports =
        exchange(bounded_store, keys, setup.rank, to_text(own), bounded_store.getTimeout());
    for (const auto& report : reports) setup.addresses.push_back(parse_report(report).address);
  }
  return std::make_shared<JobMonitor>(std::move(setup));
}

JobMonitor::JobMonitor(Setup setup)
    : setup_(std::move(setup)),
      answers_(std::make_shared<Answers>()),
      late_waits_(std::make_shared<LateWaits>(setup_.rank, setup_.size, address())) {}

JobMonitor::~JobMonitor() = default;

std::string JobMonitor::address() const {
  return setup_.liveness ? setup_.liveness->address() : "";
}

StoreExecutor& JobMonitor::executor() {
  const std::lock_guard lock(mutex_);
  if (!executor_) executor_ = std::make_unique<StoreExecutor>(setup_.store);
  return *executor_;
}

DeviceWatch& JobMonitor::device_watch() {
  const std::lock_guard lock(mutex_);
  if (!device_watch_) device_watch_ = std::make_unique<DeviceWatch>(setup_.look_every, setup_.now);
  return *device_watch_;
}

void JobMonitor::publish_waits() {
  if (!setup_.store) return;
  executor().post([waits = late_waits_](c10d::Store& store) { waits->publish(store); });
}

uint64_t JobMonitor::add(std::function<void()> abort) {
  const std::lock_guard lock(mutex_);
  groups_[++groups_made_] = std::move(abort);
  return groups_made_;
}

void JobMonitor::add_steps(
    const std::shared_ptr<SharedSteps>& steps, c10::intrusive_ptr<c10d::Store> store) {
  const std::lock_guard lock(mutex_);
  const auto is_gone = [](const Steps& one) { return one.steps.expired(); };
  steps_.erase(std::remove_if(steps_.begin(), steps_.end(), is_gone), steps_.end());
  steps_.push_back({steps, std::move(store)});
}

std::vector<JobMonitor::Steps> JobMonitor::steps() const {
  const std::lock_guard lock(mutex_);
  return steps_;
}

void JobMonitor::add_settling(const std::weak_ptr<std::function<void()>>& settle) {
  const std::lock_guard lock(mutex_);
  settlings_.push_back(settle);
}

std::vector<std::shared_ptr<std::function<void()>>> JobMonitor::settlings() {
  std::vector<std::shared_ptr<std::function<void()>>> alive;
  const std::lock_guard lock(mutex_);
  const auto is_gone = [&](const auto& settle) {
    if (auto one = settle.lock()) alive.push_back(std::move(one));
    return settle.expired();
  };
  settlings_.erase(std::remove_if(settlings_.begin(), settlings_.end(), is_gone), settlings_.end());
  return alive;
}

void JobMonitor::remove(uint64_t group) {
  std::function<void()> removed;  // destroyed after the lock: it may own a group's memory
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  removed = std::move(found->second);
  groups_.erase(found);
}

/// Reads the job's failure into `answers`. Runs on the store's thread.
void JobMonitor::update(
    Answers& answers, LateWaits& waits, c10d::Store& store, int rank,
    const std::vector<Steps>& steps) {
  std::optional<std::string> failure;
  std::unique_lock lock(answers.mutex);
  const bool looks = std::exchange(answers.looks, false);
  if (answers.generation_ended) {
    answers.request_pending = false;
    return answers.answered.notify_all();
  }
  lock.unlock();
  std::string silent_error;
  try {
    failure = read_failure(store);
    if (!failure && looks) failure = waits.look(store);
    if (failure) record_reader(store, rank);
    for (const auto& one : steps) {
      const auto alive = one.steps.lock();
      if (!failure && alive && one.store) alive->read(*one.store);
    }
  } catch (const SilentStoreError& error) {
    silent_error = text_of(error);
  } catch (const std::exception&) {
    // The process that hosts the store has ended, which probing the peers will find.
  }
  lock.lock();
  answers.silent_error = silent_error;
  if (failure) answers.failure = failure;
  answers.request_pending = false;
  answers.answered.notify_all();
}

std::optional<std::string> JobMonitor::request_failure(milliseconds at_most) {
  if (!setup_.store) return std::nullopt;
  bool is_new = false;
  {
    const std::lock_guard lock(answers_->mutex);
    answers_->looks = late_waits_->is_look_due() || answers_->looks;
    is_new = !answers_->failure && !std::exchange(answers_->request_pending, true);
    if (is_new) answers_->requested_at = Clock::now();
  }
  if (is_new) {
    auto failed = c10::make_scope_exit([&] {  // no thread can start
      const std::lock_guard lock(answers_->mutex);
      answers_->request_pending = false;
    });
    executor().post([answers = answers_, waits = late_waits_, rank = setup_.rank, steps = steps()](
                        c10d::Store& store) { update(*answers, *waits, store, rank, steps); });
    failed.release();
  }
  {
    std::unique_lock lock(answers_->mutex);
    answers_->answered.wait_for(lock, at_most, [this] { return !answers_->request_pending; });
  }
  return failure_for_this_rank();
}

std::optional<std::string> JobMonitor::failure_after_exit() {
  // The first answer may be to a request from before the exit.
  if (auto failure = request_failure(store_timeout())) return failure;
  return request_failure(store_timeout());
}

std::optional<std::string> JobMonitor::failure_for_this_rank() const {
  {
    const std::lock_guard lock(answers_->mutex);
    if (answers_->failure) return answers_->failure;
  }
  for (const auto& one : steps()) {
    const auto alive = one.steps.lock();
    if (auto failure = alive ? alive->failure() : std::nullopt) return failure;
  }
  return std::nullopt;
}

/// Returns the recorded reason, which may be another rank's.
std::string JobMonitor::record(const std::string& why) {
  if (!setup_.store) return why;
  try {
    const auto recorded = executor().ask<std::string>(
        [why, rank = setup_.rank](c10d::Store& store) {
          auto recorded = record_failure(store, why);
          record_reader(store, rank);
          return recorded;
        },
        store_timeout());
    return recorded.value_or(why);
  } catch (const std::exception&) {
    return why;  // the store has ended
  }
}

std::string JobMonitor::fail(std::string why, const FindBlamed& find_blamed) noexcept {
  try {
    if (const auto failure = this->failure()) return *failure;
    why = is_generation() ? setup_.generation.report(why, find_blamed) : record(why);
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return *failure_;
      failure_ = why;
    }
    dump_flight_record_of_failure(setup_.rank);
    abort_groups();
  } catch (const std::exception&) {
    // Out of memory or threads: the backends end their collectives at their timeout.
  }
  return why;
}

void JobMonitor::expect_no_reader(const std::vector<int>& ranks) {
  if (!setup_.store) return;
  executor().post([ranks](c10d::Store& store) {
    for (const int rank : ranks) record_reader(store, rank);
  });
}

void JobMonitor::end_generation(GenerationEnd how, const std::string& why) noexcept {
  try {
    {
      const std::lock_guard lock(answers_->mutex);
      answers_->generation_ended = true;
    }
    {
      const std::lock_guard lock(mutex_);
      // The coordinator may tell this rank later that it was left out, which counts more.
      if (failure_ && how == GenerationEnd::RankLost) return;
      end_ = how;
      if (std::exchange(failure_, why)) return;
    }
    abort_groups();
  } catch (const std::exception&) {
    // As in fail().
  }
}

std::string JobMonitor::text_of_failure(const std::string& failure) const {
  if (!is_generation()) return failure;
  return ddp::str(
      failure, ". This group ended",
      setup_.generation.number > 0 ? ddp::str(" with generation ", setup_.generation.number) : "",
      ". Ask ddp::default_group() each time, or add the object that has the group to ddp::Elastic");
}

void JobMonitor::throw_failure(const std::string& text) {
  has_thrown_ = true;
  auto end = GenerationEnd::RankLost;
  {
    const std::lock_guard lock(mutex_);
    end = end_;
  }
  if (!is_generation()) throw readable_error<c10::DistBackendError>(DDP_HERE, text);
  switch (end) {
    case GenerationEnd::RankLost:
      break;
    case GenerationEnd::Fenced:
      throw readable_error<Fenced>(DDP_HERE, text);
    case GenerationEnd::QuorumLost:
      throw readable_error<QuorumLost>(DDP_HERE, text);
  }
  throw readable_error<RankLost>(DDP_HERE, text);
}

void JobMonitor::abort_groups() {
  std::vector<std::function<void()>> aborts;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [_, abort] : groups_) aborts.push_back(abort);
  }
  aborts.erase(std::remove(aborts.begin(), aborts.end(), nullptr), aborts.end());
  call_aborts(std::move(aborts), kAbortTimeout);
}

std::optional<std::string> JobMonitor::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void JobMonitor::note_error(const std::string& why) noexcept {
  try {
    set_error(why);
  } catch (const std::exception&) {
    // Out of memory or threads: the other ranks' texts lack the cause.
  }
}

/// The other ranks read it if this one leaves. Its end may not report it: autograd keeps the graph
/// of a pass that threw, and with it the model and its groups, until the thread ends.
void JobMonitor::set_error(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (last_error_ == why) return;
    last_error_ = why;
  }
  if (!setup_.store || is_generation()) return;
  executor().post(
      [rank = setup_.rank, why](c10d::Store& store) { record_error(store, rank, why); });
}

void JobMonitor::note_agreed_error(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  const std::lock_guard lock(mutex_);
  agreed_by_ = std::move(ranks);
}

void JobMonitor::clear_error() {
  set_error("");
  const std::lock_guard lock(mutex_);
  agreed_by_.clear();
}

std::optional<std::string> JobMonitor::reason_to_leave(const std::vector<int>& ranks) const {
  const std::lock_guard lock(mutex_);
  const auto agrees = [this](int rank) {
    return std::binary_search(agreed_by_.begin(), agreed_by_.end(), rank);
  };
  if (std::all_of(ranks.begin(), ranks.end(), agrees)) return std::nullopt;
  return last_error_;
}

void JobMonitor::wait_until_failure_is_read() noexcept {
  if (!is_rank() || setup_.rank != setup_.store_host || !setup_.store) return;
  if (is_generation()) return;  // the coordinator tells them
  try {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_ || std::exchange(failure_was_read_, true)) return;
    }
    const auto all = numbers_up_to(setup_.size);
    const auto end = Clock::now() + kStoreTimeout;
    while (Clock::now() < end) {
      std::vector<int> others;
      const auto gone = find_gone(all, kProbeTimeout);
      std::set_difference(
          all.begin(), all.end(), gone.begin(), gone.end(), std::back_inserter(others));
      const auto have_all_read = executor().ask<bool>(
          [others](c10d::Store& store) { return have_read(store, others); }, kStoreTimeout);
      if (have_all_read.value_or(true)) return;
      std::this_thread::sleep_for(kCheckInterval);
    }
  } catch (const std::exception&) {
  }
}

std::vector<Liveness> JobMonitor::probe_ranks(
    const std::vector<int>& ranks, milliseconds at_most) const {
  std::vector<std::string> addresses;
  for (const int rank : ranks) addresses.push_back(setup_.addresses[static_cast<size_t>(rank)]);
  return probe(addresses, at_most);
}

std::vector<int> JobMonitor::find_gone(const std::vector<int>& ranks, milliseconds at_most) {
  if (setup_.addresses.empty()) return {};
  setup_.liveness->drain();
  const int host = setup_.store_host;
  auto probed = ranks;
  if (host >= 0) probed.push_back(host);
  const auto found = probe_ranks(probed, at_most);
  host_is_gone_ = host >= 0 && host != setup_.rank && found.back() == Liveness::Gone;
  return others_in(Liveness::Gone, ranks, found, setup_.rank);
}

std::vector<int> JobMonitor::find_silent(const std::vector<int>& ranks) const {
  if (setup_.addresses.empty()) return {};
  return others_in(Liveness::Silent, ranks, probe_ranks(ranks, kConnecting), setup_.rank);
}

std::string JobMonitor::describe_silent_store() const {
  if (!setup_.store) return "";
  const std::lock_guard lock(answers_->mutex);
  if (!answers_->silent_error.empty()) return answers_->silent_error;
  const auto waited =
      std::chrono::duration_cast<milliseconds>(Clock::now() - answers_->requested_at).count();
  if (!answers_->request_pending || waited < kStoreTimeout.count()) return "";
  const auto host = setup_.store_host < 0 ? std::string()
                                          : ddp::str(", which rank ", setup_.store_host, " hosts,");
  return ddp::str(
      "the store", host, " has not answered for ", waited,
      " ms: the process that hosts it is stopped, or cannot be reached");
}

milliseconds JobMonitor::store_timeout() const {
  return host_is_gone_ || !describe_silent_store().empty() ? kAnswerTimeout : kStoreTimeout;
}

}  // namespace ddp
