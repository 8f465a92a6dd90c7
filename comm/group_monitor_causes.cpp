// What a rank in trouble finds out about the others.
#include <algorithm>
#include <thread>
#include <utility>

#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "group_monitor_known.h"
#include "presence.h"
#include "store_executor.h"

namespace ddp {
namespace {

using namespace monitor;

// How long a rank whose collective broke looks for the reason, which may be about to be written.
constexpr milliseconds kReasonPatience{3000};

// How long a peer's host may take to complete a connection: the kernel sends again after 1 s.
constexpr milliseconds kConnecting{1500};

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of_bytes(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string list(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined_by(", ", ranks);
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

/// By rank, where it waits; empty when the store does not say.
std::vector<GroupMonitor::Waiting> GroupMonitor::waiting_ranks() {
  if (!setup_.store) return {};
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup_.size; ++rank) keys.push_back(report_key(rank));
  std::vector<std::string> reports;
  try {
    const auto question = [keys](c10d::Store& store) {
      std::vector<std::string> texts;
      for (const auto& value : store.multiGet(keys)) texts.push_back(text_of_bytes(value));
      return texts;
    };
    reports =
        executor().ask<std::vector<std::string>>(question, store_patience()).value_or(reports);
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

/// Which of the ranks that wait began a training forward pass that others did not: the likely cause
/// of collectives that do not meet. "" where they began as many.
std::string GroupMonitor::uneven_forwards(const std::vector<Waiting>& waiting) {
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
  return uneven_forwards_text(list(with), list(without));
}

/// `what` with which ranks wait where this one does, and where the others do.
std::string GroupMonitor::with_arrivals(const std::string& what, const std::string& where) {
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
  // A rank that waits nowhere stands still, whatever it began.
  const auto cause = others.empty() ? "" : uneven_forwards(waiting);
  return ddp::str(
      cause, what, "; ", list(here), " had arrived, ", list(elsewhere), " had not", others);
}

/// The peers whose processes ended, or left the group.
std::vector<int> GroupMonitor::find_gone(milliseconds at_most) {
  if (setup_.addresses.empty()) return {};
  setup_.presence->drain();
  const auto found = probe(setup_.addresses, at_most);
  std::vector<int> gone;
  for (int rank = 0; rank < setup_.size; ++rank) {
    if (rank != setup_.rank && found[static_cast<size_t>(rank)] == Presence::Gone) {
      gone.push_back(rank);
    }
  }
  host_is_gone_ = std::find(gone.begin(), gone.end(), setup_.store_host) != gone.end();
  return gone;
}

/// "rank 1 of 3 has ended"; "" for none.
std::string GroupMonitor::gone_ranks(milliseconds at_most) {
  const auto gone = find_gone(at_most);
  if (gone.empty()) return "";
  return ddp::str(
      list(gone), " of ", setup_.size, gone.size() == 1 ? " has" : " have",
      " ended, or left the process group",
      host_is_gone_ ? ddp::str(" (rank ", setup_.store_host, " hosts the store)") : "");
}

/// "; rank 1 of 3 cannot be reached: its host is down, or the network to it"; "" for none. A
/// process that is stopped can be reached.
std::string GroupMonitor::silent_ranks() const {
  if (setup_.addresses.empty()) return "";
  const auto found = probe(setup_.addresses, kConnecting);
  std::vector<int> silent;
  for (int rank = 0; rank < setup_.size; ++rank) {
    if (rank != setup_.rank && found[static_cast<size_t>(rank)] == Presence::Silent) {
      silent.push_back(rank);
    }
  }
  if (silent.empty()) return "";
  const bool is_one = silent.size() == 1;
  return ddp::str(
      "; ", list(silent), " of ", setup_.size, " cannot be reached: ",
      is_one ? "its host is down, or the network to it" : "their hosts are down, or the network");
}

/// That the store does not answer, and who hosts it; "" when it does.
std::string GroupMonitor::silent_store() const {
  if (!setup_.store) return "";
  const std::lock_guard lock(known_->mutex);
  if (!known_->silence.empty()) return known_->silence;
  const auto waited =
      std::chrono::duration_cast<milliseconds>(Clock::now() - known_->asked_at).count();
  if (!known_->asked || waited < kStorePatience.count()) return "";
  const auto host = setup_.store_host < 0 ? std::string()
                                          : ddp::str(", which rank ", setup_.store_host, " hosts,");
  return ddp::str(
      "the store", host, " has not answered for ", waited,
      " ms: the process that hosts it is stopped, or cannot be reached");
}

/// What the store says of the group's failure once a rank is gone, which said before why it goes.
std::optional<std::string> GroupMonitor::last_words() {
  // The first answer may be to a question of before.
  if (auto failure = look(store_patience())) return failure;
  return look(store_patience());
}

/// How long a rank in trouble waits for an answer of the store, whose host may be gone, or silent.
milliseconds GroupMonitor::store_patience() const {
  return host_is_gone_ || !silent_store().empty() ? kAnswerPatience : kStorePatience;
}

/// The text of a failure of this rank: what another rank recorded before, or `what` with what can
/// be found out about the peers. Stays for a while, since a rank that fails may be about to say so.
std::string GroupMonitor::explain(const std::string& what, WaitPoint where) {
  const auto end = Clock::now() + std::min(kReasonPatience, setup_.timeout / 2);
  report(where());  // for the others' texts, if they find no reason either
  auto next_comparison = Clock::now();
  auto pause = kBetweenLooks;
  while (true) {
    std::optional<std::string> compare_in;
    if (Clock::now() >= next_comparison) {
      compare_in = where();
      next_comparison = Clock::now() + std::exchange(pause, 2 * pause);
    }
    if (auto failure = look(kAnswerPatience, compare_in)) return *failure;
    const auto silent = silent_store();
    const auto gone = gone_ranks(silent.empty() ? kProbe : kStorePatience);
    if (!gone.empty()) {
      if (auto words = last_words()) return *words;
      // Again: the first that is found may have left because of another one, whose end takes
      // longer.
      const auto all_gone = gone_ranks(kProbe);
      return ddp::str(what, "; ", all_gone.empty() ? gone : all_gone);
    }
    if (!silent.empty()) return ddp::str(what, "; ", silent, silent_ranks());
    if (!setup_.store || Clock::now() >= end) return with_arrivals(what, where()) + silent_ranks();
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

}  // namespace ddp
