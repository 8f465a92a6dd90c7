#include "peer_notes.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <sstream>
#include <thread>

#include <c10/util/StringUtil.h>

namespace ddp {
namespace {

constexpr std::chrono::milliseconds kNoteEvery{20};

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string serialize(const Whereabouts& here) {
  return c10::str(
      here.pass, " ", here.forwards, " ", here.in_backward, " ", here.waits, " ", here.place);
}

Whereabouts parse_whereabouts(const std::string& text) {
  Whereabouts there;
  std::istringstream words(text);
  words >> there.pass >> there.forwards >> there.in_backward >> there.waits;
  std::getline(words >> std::ws, there.place);
  return there;
}

std::string list(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

}  // namespace

PeerNotes::PeerNotes(ProcessGroup group) : group_(std::move(group)) {
  if (group_->getSize() == 1 || !group_->getStore()) return;
  store_ = group_->getStore();
  number_ =
      store_->add(c10::str("ddp/reducers/", group_->getGroupName(), "/", group_->getRank()), 1);
}

std::string PeerNotes::key(const std::string& what) const {
  return c10::str("ddp/notes/", group_->getGroupName(), "/", number_, "/", what);
}

std::string PeerNotes::failure_key(int64_t pass) const { return key(c10::str("failure/", pass)); }
std::string PeerNotes::failed_key(int64_t pass, int rank) const {
  return key(c10::str("failed/", pass, "/", rank));
}
std::string PeerNotes::place_key(int rank) const { return key(c10::str("place/", rank)); }

std::optional<std::string> PeerNotes::get(const std::string& key) const {
  if (!store_ || !store_->check({key})) return {};
  return text(store_->get(key));
}

std::string PeerNotes::report_failure(int64_t pass, const std::string& note) const noexcept {
  try {
    // compareSet answers with what stands afterwards.
    if (store_) return text(store_->compareSet(failure_key(pass), {}, bytes(note)));
  } catch (const std::exception&) {
  }
  return note;
}

std::optional<std::string> PeerNotes::failure(int64_t pass) const noexcept {
  try {
    return get(failure_key(pass));
  } catch (const std::exception&) {
    return {};
  }
}

void PeerNotes::report_suspicion(int64_t pass, const std::string& note) const noexcept {
  try {
    if (store_) store_->set(key(c10::str("suspicion/", pass)), bytes(note));
  } catch (const std::exception&) {
  }
}

std::optional<std::string> PeerNotes::suspicion(int64_t pass) const noexcept {
  try {
    return get(key(c10::str("suspicion/", pass)));
  } catch (const std::exception&) {
    return {};
  }
}

void PeerNotes::report(const Whereabouts& here) const noexcept {
  try {
    if (store_) store_->set(place_key(group_->getRank()), bytes(serialize(here)));
  } catch (const std::exception&) {
  }
}

void PeerNotes::report_passed(Whereabouts here) const noexcept {
  here.waits = false;
  report(here);
}

std::optional<Whereabouts> PeerNotes::whereabouts(int rank) const {
  const auto note = get(place_key(rank));
  if (!note) return {};
  return parse_whereabouts(*note);
}

std::vector<int> PeerNotes::ranks_not_at(const Whereabouts& here) const {
  std::vector<int> missing;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    if (!(whereabouts(rank) == here)) missing.push_back(rank);
  }
  return missing;
}

std::string PeerNotes::arrivals(const Whereabouts& here) const noexcept {
  try {
    const auto missing = ranks_not_at(here);
    std::vector<int> arrived;
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      if (std::find(missing.begin(), missing.end(), rank) == missing.end()) arrived.push_back(rank);
    }
    if (arrived.empty()) return {};
    if (missing.empty()) return "all ranks had arrived";
    return list(arrived) + " had arrived, " + list(missing) + " had not";
  } catch (const std::exception&) {
    return {};
  }
}

void PeerNotes::report_failed(int64_t pass, const std::string& place) const noexcept {
  try {
    if (store_) store_->set(failed_key(pass, group_->getRank()), bytes(place));
  } catch (const std::exception&) {
  }
}

std::string PeerNotes::fail_alike(int64_t pass, const std::string& place) const noexcept {
  const char* not_all = "not on every rank";
  try {
    if (!store_) return {};
    report_failed(pass, place);
    const auto deadline = std::chrono::steady_clock::now() + store_->getTimeout();
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      while (true) {
        // In this order: a rank says that it failed in a pass before it says that it is in the
        // next.
        const auto there = whereabouts(rank);
        const auto failed = get(failed_key(pass, rank));
        if (failed && *failed == place) break;
        if (failed) return c10::str("in another place on rank ", rank);
        // One that runs ahead of its device ends in a later pass than this.
        if ((there && there->pass > pass) || ended_before(std::numeric_limits<int64_t>::max()) ||
            std::chrono::steady_clock::now() >= deadline) {
          return not_all;
        }
        std::this_thread::sleep_for(kNoteEvery);
      }
    }
    return {};
  } catch (const std::exception&) {
    return not_all;
  }
}

std::string PeerNotes::mismatch(const Whereabouts& here) const noexcept {
  try {
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      const auto other = whereabouts(rank);
      if (!other || !other->waits || other->pass != here.pass) continue;
      if (other->in_backward == here.in_backward) continue;
      const bool i_am_ahead = here.in_backward;
      const auto& backward = i_am_ahead ? here : *other;
      const auto& forward = i_am_ahead ? *other : here;
      // One that goes backward after n forwards answers no forward beyond the n-th.
      if (forward.forwards < backward.forwards) continue;
      return c10::str(
          "rank ", i_am_ahead ? rank : group_->getRank(), " of ", group_->getSize(),
          " waits before its training forward number ", forward.forwards + 1,
          " since the last reduced backward pass, and rank ", i_am_ahead ? group_->getRank() : rank,
          " in its backward pass after ", backward.forwards,
          ". Every rank has to run as many forward and backward passes");
    }
  } catch (const std::exception&) {
  }
  return {};
}

void PeerNotes::report_end(int64_t pass, int64_t waits, const std::string& because) const noexcept {
  try {
    if (!store_) return;
    store_->set(
        key(c10::str("end/", group_->getRank())), bytes(c10::str(pass, " ", waits, " ", because)));
  } catch (const std::exception&) {
  }
}

std::optional<PeerNotes::End> PeerNotes::ended_before(int64_t pass, int64_t waits) const noexcept {
  try {
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      const auto note = get(key(c10::str("end/", rank)));
      if (!note) continue;
      std::istringstream fields(*note);
      int64_t last_pass = 0, last_waits = 0;
      fields >> last_pass >> last_waits;
      fields.get();  // a space
      End end{rank, {}};
      std::getline(fields, end.because, '\0');
      if (last_pass < pass || (last_pass == pass && last_waits <= waits)) return end;
    }
  } catch (const std::exception&) {
  }
  return {};
}

}  // namespace ddp
