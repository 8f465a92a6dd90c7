#include "peer_notes.h"

#include <algorithm>
#include <thread>

#include <c10/util/StringUtil.h>

namespace ddp {
namespace {

constexpr std::chrono::milliseconds kPollEvery{20};

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

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

std::string PeerNotes::key(int64_t pass, const std::string& what) const {
  return c10::str("ddp/notes/", group_->getGroupName(), "/", number_, "/", pass, "/", what);
}

std::optional<std::string> PeerNotes::get(const std::string& key) const {
  if (!store_ || !store_->check({key})) return {};
  return text(store_->get(key));
}

std::string PeerNotes::report_failure(int64_t pass, const std::string& note) const noexcept {
  try {
    // compareSet answers with what stands afterwards.
    if (store_) return text(store_->compareSet(key(pass, "failure"), {}, bytes(note)));
  } catch (const std::exception&) {
  }
  return note;
}

std::optional<std::string> PeerNotes::failure(int64_t pass) const noexcept {
  try {
    return get(key(pass, "failure"));
  } catch (const std::exception&) {
    return {};
  }
}

void PeerNotes::report_place(int64_t pass, const std::string& place) const noexcept {
  try {
    if (store_) {
      store_->set(key(pass, c10::str("place/", group_->getRank())), bytes(place));
    }
  } catch (const std::exception&) {
  }
}

std::vector<int> PeerNotes::ranks_not_in(int64_t pass, const std::string& place) const {
  std::vector<int> missing;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    if (get(key(pass, c10::str("place/", rank))) != place) missing.push_back(rank);
  }
  return missing;
}

std::string PeerNotes::arrivals(int64_t pass, const std::string& place) const noexcept {
  try {
    const auto missing = ranks_not_in(pass, place);
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

bool PeerNotes::all_arrive(
    int64_t pass, const std::string& place, std::chrono::milliseconds patience) const noexcept {
  try {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (!ranks_not_in(pass, place).empty()) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(kPollEvery);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace ddp
