#include "bootstrap_round.h"

#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/text.h>

namespace ddp::backends::shm {
namespace {

// The first character of an entry.
constexpr char kEntry = '=';
constexpr char kProblem = '!';

std::string key_of(const std::string& round, size_t rank) { return ddp::str(round, "/", rank); }

std::vector<std::string> read_all(c10d::Store& store, const std::vector<std::string>& keys) {
  std::vector<std::string> texts;
  if (store.hasExtendedApi()) {
    for (const auto& bytes : store.multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
  } else {
    for (const auto& key : keys) texts.push_back(store.get_to_str(key));
  }
  return texts;
}

}  // namespace

void throw_malformed(const Round& round, size_t rank, const char* expected) {
  DDP_CHECK(
      false, "backend shm: expected ", expected, " in the store's entry ", key_of(round.name, rank),
      " of rank ", rank, " of ", round.entries.size(), ", got \"", round.entries[rank],
      "\". Use a store, or a prefix of one, to which nothing else writes.");
}

Round share(
    const Setup& setup, const std::string& name, c10::function_ref<std::string()> make_entry) {
  std::string entry;
  const auto problem = problem_of([&] { entry = make_entry(); });
  std::vector<std::string> keys;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    keys.push_back(key_of(name, static_cast<size_t>(rank)));
  }
  setup.store->set(
      keys[static_cast<size_t>(setup.rank)], problem.empty() ? kEntry + entry : kProblem + problem);
  setup.store->wait(keys, setup.connect_by.left());

  Round round{name, read_all(*setup.store, keys), ""};
  for (size_t rank = 0; rank < round.entries.size(); ++rank) {
    auto& text = round.entries[rank];
    const char kind = text.empty() ? '\0' : text[0];
    if (kind != kEntry && kind != kProblem)
      throw_malformed(round, rank, "a text that begins with = or !");
    text.erase(0, 1);
    if (kind == kProblem && round.problem.empty()) {
      round.problem = ddp::str("rank ", rank, ": ", text);
    }
  }
  return round;
}

}  // namespace ddp::backends::shm
