#include "roll_call.h"

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "bounded_store.h"

namespace ddp {
namespace {

// Keys of the store. "open" holds the name of the current roll; the others lie under that name:
//   who/R      the name of the process that has come as rank R; only the first one takes part
//   claim      the first comer's rank and claim
//   problem    why the verdict cannot be "ok"
//   here/R     rank R is here            count      how many are
//   full       all are here, or there is a verdict: what a rank that has come waits for
//   alive/R    rank R saw `full`         confirmed  how many did
//   verdict    "ok", kSuperseded, or what everybody throws
//   deciders   how many ranks looked for the missing ones
//   read       how many have read the verdict
//   left       all have read the verdict "ok"
constexpr const char* kOpen = "open";
constexpr const char* kOk = "ok";
constexpr const char* kSuperseded = "superseded";  // the roll is over, and a newer one opens
constexpr auto kReadersGrace = std::chrono::seconds(2);
constexpr auto kDeciderGrace = std::chrono::milliseconds(300);
constexpr auto kFirstLook = std::chrono::milliseconds(100);
constexpr auto kBetweenLooks = std::chrono::milliseconds(1000);

std::string random_name() {
  std::random_device device;
  OutputText name;
  name << std::hex << std::setfill('0') << std::setw(8) << device() << std::setw(8) << device();
  return name.str();
}

// Sleeps longer each time: quick when everybody is here, light on the store when not. All ranks
// together ask it 2000 times a second at most.
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

std::string subject_of(const RollCall& roll) {
  return ddp::str(roll.subject, " on rank ", roll.rank, " of ", roll.world_size, ": ");
}

class Caller {
 public:
  Caller(RollCall roll, std::string claim, std::string problem)
      : roll_(std::move(roll)),
        claim_(std::move(claim)),
        problem_(std::move(problem)),
        me_(random_name()) {}

  std::string call() {
    try {
      return call_until_agreed();
    } catch (const SilentStoreError&) {
      throw;
    } catch (const c10::DistError& error) {
      const auto text = ddp::str(
          subject_of(roll_),
          "lost the store while it waited for the other ranks. The process that has it, usually "
          "rank 0, ended: look there for the reason. (",
          error.what_without_backtrace(), ")");
      DDP_CHECK(!all_came_, text);
      throw readable_error<EarlyLossError>(DDP_HERE, text);
    }
  }

 private:
  std::string call_until_agreed() {
    for (;;) {
      all_came_ = false;
      join();
      if (const auto verdict = attend()) {
        leave(*verdict);
        DDP_CHECK(*verdict == kOk, *verdict);
        return name_;
      }
    }
  }

  std::string key(const std::string& suffix) const { return name_ + "/" + suffix; }
  std::string key(const std::string& prefix, int rank) const {
    return key(prefix + "/" + std::to_string(rank));
  }
  bool has(const std::string& key) { return roll_.store->check({key}); }

  // Whether the key came within that time. It asks again and again, one operation each, because
  // TCPStore serves nobody else of this process while it waits itself.
  bool wait_for(const std::string& key, std::chrono::milliseconds timeout) {
    const Deadline latest(timeout);
    for (Poll poll(roll_.world_size);; poll.pause()) {
      DDP_CHECK(!roll_.given_up || !*roll_.given_up, roll_.subject, ": given up");
      if (has(key)) return true;
      if (latest.passed()) return false;
    }
  }

  // The name of the roll that is open.
  std::string open() {
    try {
      return roll_.store->compareSet(kOpen, "", random_name());
    } catch (const c10::NotImplementedError&) {
      DDP_CHECK_WITH(
          NotImplementedError, false, roll_.subject,
          ": expected a store that implements compareSet, got one that does ", "not on rank ",
          roll_.rank, " of ", roll_.world_size,
          ". Use a TCPStore, FileStore or HashStore, or override compareSet in a class of your "
          "own.");
    }
  }

  void join() {
    name_ = open();
    if (first_.empty()) first_ = name_;
    // A fresh name each time: the others may have ended the roll this rank opened a moment ago.
    while (!takes_part()) {
      if (!has(key("verdict"))) decide(kSuperseded);
      name_ = roll_.store->compareSet(kOpen, name_, random_name());
    }
    if (!problem_.empty()) roll_.store->compareSet(key("problem"), "", problem_);
    roll_.store->set(key("here", roll_.rank), "1");
    if (roll_.store->add(key("count"), 1) == roll_.world_size) roll_.store->set(key("full"), "1");
  }

  // False where the roll that is open is over, or may have been left open by processes that died:
  // then the first to notice opens the next.
  bool takes_part() {
    const bool opened_since = name_ != first_;  // since this call began, so by somebody who lives
    const bool is_rival = roll_.store->compareSet(key("who", roll_.rank), "", me_) != me_;
    if (is_rival && opened_since) {
      rival_ = two_processes();
      decide(rival_);
      return true;
    }
    if (is_rival || has(key("verdict"))) return false;
    const auto difference = compare_claims();
    if (difference.empty()) return true;
    if (opened_since) decide(difference);
    return opened_since;
  }

  std::string two_processes() const {
    return ddp::str(
        roll_.subject, ": expected one process for each of the ", roll_.world_size,
        " ranks, but two processes claim rank ", roll_.rank,
        ". Give every process a RANK (or rank()) of its own, and end those of an earlier start.");
  }

  // Empty when this rank's claim is the first one's.
  std::string compare_claims() {
    const auto first =
        roll_.store->compareSet(key("claim"), "", std::to_string(roll_.rank) + " " + claim_);
    const auto space = first.find(' ');
    const auto their_claim = first.substr(space + 1);
    if (their_claim == claim_) return "";
    return ddp::str(
        roll_.subject, ": expected all ranks to call it alike, but rank ", first.substr(0, space),
        " calls it with ", their_claim, " and rank ", roll_.rank, " with ", claim_,
        ". Give every rank the same.");
  }

  // The verdict; nothing when a newer roll has taken this one's place.
  std::optional<std::string> attend() {
    bool confirmed = false;
    for (auto pause = kFirstLook;; pause = std::min(2 * pause, kBetweenLooks)) {
      const bool came =
          wait_for(key(confirmed ? "verdict" : "full"), std::min(pause, roll_.deadline.left()));
      const bool superseded = !came && roll_.store->get_to_str(kOpen) != name_;
      // Asked after: whoever opened a newer roll because this one is over did so with the verdict
      // already there.
      if ((came && confirmed) || has(key("verdict"))) return verdict();
      if (roll_.deadline.passed()) {
        decide_who_is_missing(confirmed ? "alive" : "here");
      } else if (superseded) {
        return std::nullopt;
      } else if (came) {
        // Among those that are here may be some that died since; they do not confirm.
        all_came_ = confirmed = true;
        confirm();
      }
    }
  }

  void confirm() {
    roll_.store->set(key("alive", roll_.rank), "1");
    if (roll_.store->add(key("confirmed"), 1) != roll_.world_size) return;
    const auto problem = known_problem();
    // An answer that came late, from a store that was frozen, makes no group: others gave up.
    if (!roll_.deadline.passed()) decide(problem.empty() ? kOk : problem);
  }

  std::optional<std::string> verdict() {
    const auto verdict = roll_.store->get_to_str(key("verdict"));
    if (verdict == kSuperseded) return std::nullopt;
    // The roll went well, but with the other process of this rank.
    return verdict == kOk && !rival_.empty() ? rival_ : verdict;
  }

  std::string known_problem() {
    return has(key("problem")) ? roll_.store->get_to_str(key("problem")) : "";
  }

  std::string who_is_missing(const std::string& sign_of_life) {
    std::vector<int> missing;
    for (int rank = 0; rank < roll_.world_size; ++rank) {
      if (!has(key(sign_of_life, rank))) missing.push_back(rank);
    }
    const auto ranks = joined_by(", ", missing);
    const auto who = missing.empty()       ? "the last of them came later"
                     : missing.size() == 1 ? ddp::str("rank ", ranks, " did not come")
                                           : ddp::str("ranks ", ranks, " did not come");
    const auto problem = known_problem();
    return ddp::str(
        problem, problem.empty() ? "" : " Also, ", roll_.subject, ": expected all ",
        roll_.world_size, " ranks within ", roll_.deadline.timeout().count(), " ms, but ", who,
        ". Look for what ended or delayed ", missing.size() > 1 ? "them" : "it",
        ", or set a longer timeout.");
  }

  // The ranks pass their deadlines together, and asking for each rank is one's work: the others
  // wait for its verdict first.
  void decide_who_is_missing(const std::string& sign_of_life) {
    const bool is_first = roll_.store->add(key("deciders"), 1) == 1;
    if (is_first || !wait_for(key("verdict"), kDeciderGrace)) {
      decide(who_is_missing(sign_of_life));
    }
  }

  // The first verdict stands.
  void decide(const std::string& verdict) {
    roll_.store->compareSet(key("verdict"), "", verdict);
    roll_.store->set(key("full"), "1");
  }

  void leave(const std::string& verdict) {
    const bool all_read = roll_.store->add(key("read"), 1) == roll_.world_size;
    if (all_read) roll_.store->set(key("left"), "1");
    if (all_read || roll_.rank != 0) return;
    if (verdict == kOk) {
      wait_for(key("left"), kReadersGrace);
      return;
    }
    const Deadline latest(kReadersGrace);
    for (Poll poll(roll_.world_size); !latest.passed(); poll.pause()) {
      if (roll_.store->add(key("read"), 0) >= roll_.store->add(key("count"), 0)) return;
    }
  }

  const RollCall roll_;
  std::string claim_;
  std::string problem_;
  std::string me_;     // this call
  std::string first_;  // the roll that was open when this call began
  std::string name_;   // the roll this call takes part in
  std::string rival_;  // the verdict about another process of this rank
  bool all_came_ = false;
};

}  // namespace

std::string call_roll(const RollCall& roll, const std::string& claim, const std::string& problem) {
  if (roll.world_size == 1) {
    DDP_CHECK(problem.empty(), problem);
    return random_name();
  }
  const auto name = std::make_shared<std::string>();
  try {
    const auto by_name = problem.empty() ? problem : subject_of(roll) + problem;
    bounded(roll.store)->by(roll.deadline)->run([roll, claim, by_name, name](const auto& store) {
      auto over_this = roll;
      over_this.store = store;
      *name = Caller(over_this, claim, by_name).call();
    });
    return *name;
  } catch (const SilentStoreError& error) {
    throw readable_error<c10::Error>(
        DDP_HERE, ddp::str(subject_of(roll), error.what_without_backtrace(), "."));
  }
}

}  // namespace ddp
