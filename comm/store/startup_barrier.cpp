#include "store/startup_barrier.h"

#include <algorithm>
#include <iomanip>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "store/bounded_store.h"

namespace ddp {
namespace {

// Keys of the store. "open" holds the name of the current round; the others have that name before
// them:
//   who/R      the name of the process that arrived as rank R; only the first one takes part
//   claim      the rank and the claim of the first process to arrive
//   problem    why the verdict cannot be "ok"
//   here/R     rank R has arrived        count      how many have
//   full       all have arrived, or there is a verdict; a rank that has arrived waits for it
//   alive/R    rank R has seen `full`    confirmed  how many have
//   verdict    "ok", kSuperseded, or the text that all ranks throw
//   deciders   how many ranks have looked for the missing ones
//   read       how many have read the verdict
//   left       all have read the verdict "ok"
constexpr const char* kOpen = "open";
constexpr const char* kOk = "ok";
constexpr const char* kSuperseded = "superseded";  // the round is over, and a newer one opens
constexpr auto kReadersGrace = std::chrono::seconds(2);
constexpr auto kDeciderGrace = std::chrono::milliseconds(300);
constexpr auto kFirstLook = std::chrono::milliseconds(100);
constexpr auto kCheckInterval = std::chrono::milliseconds(1000);

std::string random_name() {
  std::random_device device;
  OutputText name;
  name << std::hex << std::setfill('0') << std::setw(8) << device() << std::setw(8) << device();
  return name.str();
}

// Sleeps longer each time: quick if all ranks arrive together, light on the store if not. All ranks
// together poll it 2000 times a second at most.
class Poll {
 public:
  explicit Poll(int world_size) : longest_(1000 * std::max(20, world_size / 2)) {}

  void pause() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(2 * pause_, longest_);
  }

 private:
  std::chrono::microseconds pause_{250};
  const std::chrono::microseconds longest_;
};

std::string subject_of(const StartupBarrier& barrier) {
  return ddp::str(barrier.subject, " on rank ", barrier.rank, " of ", barrier.world_size, ": ");
}

class BarrierParticipant {
 public:
  BarrierParticipant(StartupBarrier barrier, std::string claim, std::string problem)
      : barrier_(std::move(barrier)),
        claim_(std::move(claim)),
        problem_(std::move(problem)),
        own_name_(random_name()) {}

  std::string run() {
    try {
      return run_rounds();
    } catch (const SilentStoreError&) {
      throw;
    } catch (const c10::DistError& error) {
      const auto text = ddp::str(
          subject_of(barrier_),
          "lost the store while it waited for the other ranks. The process that has it, usually "
          "rank 0, ended: look there for the reason. (",
          error.what_without_backtrace(), ")");
      DDP_CHECK(!all_arrived_, text);
      throw readable_error<EarlyLossError>(DDP_HERE, text);
    }
  }

 private:
  std::string run_rounds() {
    for (;;) {
      all_arrived_ = false;
      enter();
      if (const auto verdict = wait_for_verdict()) {
        wait_for_readers(*verdict);
        DDP_CHECK(*verdict == kOk, *verdict);
        return round_;
      }
    }
  }

  std::string key(const std::string& suffix) const { return round_ + "/" + suffix; }
  std::string key(const std::string& prefix, int rank) const {
    return key(prefix + "/" + std::to_string(rank));
  }
  bool has(const std::string& key) { return barrier_.store->check({key}); }

  // Whether the key was set within that time. Polls with one operation each, because TCPStore
  // serves no other thread of this process while it waits itself.
  bool wait_for(const std::string& key, std::chrono::milliseconds timeout) {
    const Deadline latest(timeout);
    for (Poll poll(barrier_.world_size);; poll.pause()) {
      if (has(key)) return true;
      if (latest.passed()) return false;
    }
  }

  // Opens a round unless one is open; returns its name.
  std::string open_round() {
    try {
      return barrier_.store->compareSet(kOpen, "", random_name());
    } catch (const c10::NotImplementedError&) {
      DDP_CHECK_WITH(
          NotImplementedError, false, barrier_.subject,
          ": expected a store that implements compareSet, got one that does ", "not on rank ",
          barrier_.rank, " of ", barrier_.world_size,
          ". Use a TCPStore, FileStore or HashStore, or override compareSet in a class of your "
          "own.");
    }
  }

  void enter() {
    round_ = open_round();
    if (first_round_.empty()) first_round_ = round_;
    // A fresh name each time: other ranks may have ended the round that this rank opened just now.
    while (!try_enter()) {
      if (!has(key("verdict"))) decide(kSuperseded);
      round_ = barrier_.store->compareSet(kOpen, round_, random_name());
    }
    if (!problem_.empty()) barrier_.store->compareSet(key("problem"), "", problem_);
    barrier_.store->set(key("here", barrier_.rank), "1");
    if (barrier_.store->add(key("count"), 1) == barrier_.world_size)
      barrier_.store->set(key("full"), "1");
  }

  // Joins the open round. False if that round is over, or may have been left open by processes that
  // died: then the first rank to notice opens the next round.
  bool try_enter() {
    // Since this call began, so by a live process.
    const bool opened_since = round_ != first_round_;
    const bool is_rival =
        barrier_.store->compareSet(key("who", barrier_.rank), "", own_name_) != own_name_;
    if (is_rival && opened_since) {
      rival_ = two_processes();
      decide(rival_);
      return true;
    }
    if (is_rival) return false;
    // The verdict of a round of live processes is this rank's, too: another one may have found it
    // while this rank entered.
    if (has(key("verdict"))) return opened_since && !is_superseded();
    const auto difference = compare_claims();
    if (difference.empty()) return true;
    if (opened_since) decide(difference);
    return opened_since;
  }

  bool is_superseded() { return barrier_.store->get_to_str(key("verdict")) == kSuperseded; }

  std::string two_processes() const {
    return ddp::str(
        barrier_.subject, ": expected one process for each of the ", barrier_.world_size,
        " ranks, but two processes claim rank ", barrier_.rank,
        ". Give every process a RANK (or rank()) of its own, and end those of an earlier start.");
  }

  // Compares this rank's claim with the first one. Empty if they are equal.
  std::string compare_claims() {
    const auto first =
        barrier_.store->compareSet(key("claim"), "", std::to_string(barrier_.rank) + " " + claim_);
    const auto space = first.find(' ');
    const auto their_claim = first.substr(space + 1);
    if (their_claim == claim_) return "";
    return ddp::str(
        barrier_.subject, ": expected all ranks to call it alike, but rank ",
        first.substr(0, space), " calls it with ", their_claim, " and rank ", barrier_.rank,
        " with ", claim_, ". Give every rank the same.");
  }

  // Waits for the verdict; returns nothing if a newer round has replaced this one.
  std::optional<std::string> wait_for_verdict() {
    bool confirmed = false;
    for (auto pause = kFirstLook;; pause = std::min(2 * pause, kCheckInterval)) {
      const bool came =
          wait_for(key(confirmed ? "verdict" : "full"), std::min(pause, barrier_.deadline.left()));
      const bool superseded = !came && barrier_.store->get_to_str(kOpen) != round_;
      // Checked after `open`: a rank that opened a newer round because this one is over did so when
      // the verdict was already set.
      if ((came && confirmed) || has(key("verdict"))) return verdict();
      if (barrier_.deadline.passed()) {
        decide_who_is_missing(confirmed ? "alive" : "here");
      } else if (superseded) {
        return std::nullopt;
      } else if (came) {
        // Some ranks may have died since they arrived; they do not confirm.
        all_arrived_ = confirmed = true;
        confirm();
      }
    }
  }

  void confirm() {
    barrier_.store->set(key("alive", barrier_.rank), "1");
    if (barrier_.store->add(key("confirmed"), 1) != barrier_.world_size) return;
    const auto problem = known_problem();
    // A late answer, from a store that was frozen, must not make a group: other ranks gave up.
    if (!barrier_.deadline.passed()) decide(problem.empty() ? kOk : problem);
  }

  std::optional<std::string> verdict() {
    const auto verdict = barrier_.store->get_to_str(key("verdict"));
    if (verdict == kSuperseded) return std::nullopt;
    // The round succeeded, but with the other process that has this rank.
    return verdict == kOk && !rival_.empty() ? rival_ : verdict;
  }

  std::string known_problem() {
    return has(key("problem")) ? barrier_.store->get_to_str(key("problem")) : "";
  }

  std::string who_is_missing(const std::string& sign_of_life) {
    std::vector<int> missing;
    for (int rank = 0; rank < barrier_.world_size; ++rank) {
      if (!has(key(sign_of_life, rank))) missing.push_back(rank);
    }
    const auto who =
        missing.empty() ? "the last of them came later" : ranks_text(missing) + " did not come";
    const auto problem = known_problem();
    return ddp::str(
        problem, problem.empty() ? "" : " Also, ", barrier_.subject, ": expected all ",
        barrier_.world_size, " ranks within ", barrier_.deadline.timeout().count(), " ms, but ",
        who, ". Look for what ended or delayed ", missing.size() > 1 ? "them" : "it",
        ", or set a longer timeout.");
  }

  // The ranks pass their deadlines together, but one rank checks for each missing rank: the others
  // first wait for its verdict.
  void decide_who_is_missing(const std::string& sign_of_life) {
    const bool is_first = barrier_.store->add(key("deciders"), 1) == 1;
    if (is_first || !wait_for(key("verdict"), kDeciderGrace)) {
      decide(who_is_missing(sign_of_life));
    }
  }

  // Sets the verdict, unless there is one.
  void decide(const std::string& verdict) {
    barrier_.store->compareSet(key("verdict"), "", verdict);
    barrier_.store->set(key("full"), "1");
  }

  void wait_for_readers(const std::string& verdict) {
    const bool all_read = barrier_.store->add(key("read"), 1) == barrier_.world_size;
    if (all_read) barrier_.store->set(key("left"), "1");
    if (all_read || barrier_.rank != 0) return;
    if (verdict == kOk) {
      wait_for(key("left"), kReadersGrace);
      return;
    }
    const Deadline latest(kReadersGrace);
    for (Poll poll(barrier_.world_size); !latest.passed(); poll.pause()) {
      if (barrier_.store->add(key("read"), 0) >= barrier_.store->add(key("count"), 0)) return;
    }
  }

  const StartupBarrier barrier_;
  std::string claim_;
  std::string problem_;
  std::string own_name_;     // a name for this call
  std::string first_round_;  // the round that was open when this call began
  std::string round_;        // the round that this call takes part in
  std::string rival_;        // the verdict about another process with this rank
  bool all_arrived_ = false;
};

}  // namespace

std::string run_startup_barrier(
    const StartupBarrier& barrier, const std::string& claim, const std::string& problem) {
  if (barrier.world_size == 1) {
    DDP_CHECK(problem.empty(), problem);
    return random_name();
  }
  auto in_time = barrier;
  in_time.store = bounded(barrier.store)->with_deadline(barrier.deadline);
  try {
    const auto by_name = problem.empty() ? problem : subject_of(barrier) + problem;
    return BarrierParticipant(in_time, claim, by_name).run();
  } catch (const SilentStoreError& error) {
    throw readable_error<c10::Error>(
        DDP_HERE, ddp::str(subject_of(barrier), error.what_without_backtrace(), "."));
  }
}

}  // namespace ddp
