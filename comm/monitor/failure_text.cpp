// Finds out why a wait failed, from the other ranks' state.
#include <algorithm>
#include <thread>
#include <utility>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/rank_text.h>
#include <ddp/internal/text.h>

#include "monitor/liveness_socket.h"
#include "monitor/store_answers.h"
#include "store/store_executor.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a rank whose collective failed waits for the reason, which another rank may be about to
// write.
constexpr milliseconds kReasonTimeout{3000};

// How long a peer's host may take to accept a connection: the kernel sends again after 1 s.
constexpr milliseconds kConnecting{1500};

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of_bytes(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

}  // namespace

std::string monitor::uneven_forwards_text(const std::string& with, const std::string& without) {
  return ddp::str(
      with, " began a training forward pass that ", without,
      " did not. Every rank has to train on as many batches, or in join(): ");
}

void GroupMonitor::report(const std::string& where) {
  if (!setup_.store) return;
  const auto rank = static_cast<size_t>(setup_.rank);
  const auto address = rank < setup_.addresses.size() ? setup_.addresses[rank] : "";
  std::unique_lock lock(mutex_);
  const auto text = ddp::str(address, '\t', where, '\t', attempts_);
  lock.unlock();
  executor().post(
      [key = report_key(setup_.rank), text](auto& store) { store.set(key, bytes_of(text)); });
}

/// Reads each rank's report; empty if the store does not answer.
std::vector<GroupMonitor::Waiting> GroupMonitor::waiting_ranks() {
  if (!setup_.store) return {};
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup_.size; ++rank) keys.push_back(report_key(rank));
  std::vector<std::string> reports;
  try {
    const auto read_reports = [keys](c10d::Store& store) {
      std::vector<std::string> texts;
      for (const auto& value : store.multiGet(keys)) texts.push_back(text_of_bytes(value));
      return texts;
    };
    reports =
        executor().ask<std::vector<std::string>>(read_reports, store_timeout()).value_or(reports);
  } catch (const std::exception&) {
  }
  std::vector<Waiting> waiting;
  for (const auto& text : reports) {
    const auto begin = std::min(text.find('\t'), text.size());
    const auto end = std::min(text.find('\t', begin + 1), text.size());
    auto& place = waiting.emplace_back();
    if (begin < end) place.where = text.substr(begin + 1, end - begin - 1);
    if (end < text.size()) place.attempts = std::stoull(text.substr(end + 1));
  }
  return waiting;
}

/// Names the waiting ranks that began a training forward pass that others did not begin: the likely
/// cause if the ranks wait in different collectives. "" if all began the same number.
std::string GroupMonitor::describe_uneven_forwards(const std::vector<Waiting>& waiting) {
  std::optional<uint64_t> most, least;
  for (const auto& rank : waiting) {
    if (rank.where.empty()) continue;
    most = std::max(most.value_or(rank.attempts), rank.attempts);
    least = std::min(least.value_or(rank.attempts), rank.attempts);
  }
  if (most == least) return "";
  std::vector<int> with, without;
  for (size_t rank = 0; rank < waiting.size(); ++rank) {
    if (waiting[rank].where.empty()) continue;
    if (waiting[rank].attempts == *most) with.push_back(static_cast<int>(rank));
    if (waiting[rank].attempts == *least) without.push_back(static_cast<int>(rank));
  }
  return uneven_forwards_text(ranks_text(with), ranks_text(without));
}

/// Appends to `what` which ranks wait where this one does, and where the other ranks wait.
std::string GroupMonitor::add_arrivals(const std::string& what, const std::string& where) {
  const auto waiting = waiting_ranks();
  if (waiting.empty()) return what;
  std::vector<int> here, elsewhere;
  std::string others;
  for (int rank = 0; rank < setup_.size; ++rank) {
    const auto& place = waiting[static_cast<size_t>(rank)].where;
    (place == where ? here : elsewhere).push_back(rank);
    if (place != where && !place.empty()) others += ddp::str("; rank ", rank, " waits in ", place);
  }
  if (elsewhere.empty()) return what + "; all ranks had arrived";
  // A rank that waits nowhere does not make progress, whatever number of passes it began.
  const auto cause = others.empty() ? "" : describe_uneven_forwards(waiting);
  return ddp::str(
      cause, what, "; ", ranks_text(here), " had arrived, ", ranks_text(elsewhere), " had not",
      others);
}

/// Finds the peers whose processes ended, or left the group.
std::vector<int> GroupMonitor::find_gone(milliseconds at_most) {
  if (setup_.addresses.empty()) return {};
  setup_.liveness->drain();
  const auto found = probe(setup_.addresses, at_most);
  std::vector<int> gone;
  for (int rank = 0; rank < setup_.size; ++rank) {
    if (rank != setup_.rank && found[static_cast<size_t>(rank)] == Liveness::Gone) {
      gone.push_back(rank);
    }
  }
  host_is_gone_ = std::find(gone.begin(), gone.end(), setup_.store_host) != gone.end();
  return gone;
}

/// "rank 1 of 3 has ended"; "" if all peers exist.
std::string GroupMonitor::describe_gone_ranks(milliseconds at_most) {
  const auto gone = find_gone(at_most);
  if (gone.empty()) return "";
  return ddp::str(
      ranks_text(gone), " of ", setup_.size, gone.size() == 1 ? " has" : " have",
      " ended, or left the process group",
      host_is_gone_ ? ddp::str(" (rank ", setup_.store_host, " hosts the store)") : "");
}

/// "; rank 1 of 3 cannot be reached: its host is down, or the network to it"; "" if all hosts can
/// be reached. A stopped process can be reached.
std::string GroupMonitor::describe_silent_ranks() const {
  if (setup_.addresses.empty()) return "";
  const auto found = probe(setup_.addresses, kConnecting);
  std::vector<int> silent;
  for (int rank = 0; rank < setup_.size; ++rank) {
    if (rank != setup_.rank && found[static_cast<size_t>(rank)] == Liveness::Silent) {
      silent.push_back(rank);
    }
  }
  if (silent.empty()) return "";
  const bool is_one = silent.size() == 1;
  return ddp::str(
      "; ", ranks_text(silent), " of ", setup_.size, " cannot be reached: ",
      is_one ? "its host is down, or the network to it" : "their hosts are down, or the network");
}

/// States that the store does not answer, and who hosts it; "" if it answers.
std::string GroupMonitor::describe_silent_store() const {
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

/// Reads the group's failure after a rank has exited, which it may have recorded before.
std::optional<std::string> GroupMonitor::read_failure_after_exit() {
  // The first answer may be to a request from before the exit.
  if (auto failure = query_store(store_timeout())) return failure;
  return query_store(store_timeout());
}

/// How long a failing rank waits for an answer of the store, whose host may be gone, or silent.
milliseconds GroupMonitor::store_timeout() const {
  return host_is_gone_ || !describe_silent_store().empty() ? kAnswerTimeout : kStoreTimeout;
}

/// Returns the text of this rank's failure: the failure that another rank recorded before, or
/// `what` with the state of the peers. Waits a while for the former, since a failing rank may
/// be about to record it.
std::string GroupMonitor::describe_failure(const std::string& what, WaitPoint where) {
  const auto end = Clock::now() + std::min(kReasonTimeout, setup_.timeout / 2);
  report(where());  // for the other ranks' texts, if they find no reason either
  auto next_comparison = Clock::now();
  auto pause = kCheckInterval;
  while (true) {
    std::optional<std::string> compare_in;
    if (Clock::now() >= next_comparison) {
      compare_in = where();
      next_comparison = Clock::now() + std::exchange(pause, 2 * pause);
    }
    if (auto failure = query_store(kAnswerTimeout, compare_in)) return *failure;
    const auto silent = describe_silent_store();
    const auto gone = describe_gone_ranks(silent.empty() ? kProbeTimeout : kStoreTimeout);
    if (!gone.empty()) {
      if (auto recorded = read_failure_after_exit()) return *recorded;
      // Probe again: the first rank found may have left because of another one, whose end takes
      // longer.
      const auto all_gone = describe_gone_ranks(kProbeTimeout);
      return ddp::str(what, "; ", all_gone.empty() ? gone : all_gone);
    }
    if (!silent.empty()) return ddp::str(what, "; ", silent, describe_silent_ranks());
    if (!setup_.store || Clock::now() >= end)
      return add_arrivals(what, where()) + describe_silent_ranks();
    std::this_thread::sleep_for(kCheckInterval);
  }
}

}  // namespace ddp
