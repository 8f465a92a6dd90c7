#include "monitor/failure_records.h"

#include <c10/util/Exception.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Keys of the store:
//   failure      why the job failed: the text of the first rank that failed
//   reader/R     rank R has read the failure
// Ranks record attempts at the same time and in any order, so each entry has a key of its own: one
// key for all would lose concurrent writes.
//   attempt/G/N  the first failure of attempt N in group G
//   attempts     the length of the list, including entries that are about to be set
//   attempts/I   entry I, from 1
//   first/K      how many ranks have tried to be the first to set K, if there is no compareSet
constexpr const char* kFailure = "failure";
constexpr const char* kCount = "attempts";

std::string reader_key(int rank) { return ddp::str("reader/", rank); }

std::string entry_key(int64_t entry) { return ddp::str(kCount, "/", entry); }

std::string serialize(const FailedAttempt& attempt) {
  return ddp::str(attempt.rank, '\t', attempt.number, '\t', attempt.group, '\t', attempt.why);
}

FailedAttempt parse_attempt(const std::string& text) {
  FailedAttempt attempt;
  InputText fields(text);
  fields >> attempt.rank >> attempt.number;
  fields.get();  // a tab
  std::getline(fields, attempt.group, '\t');
  std::getline(fields, attempt.why, '\0');
  return attempt;
}

// Sets `key`, unless another rank has set it before. Returns its value after that.
std::string set_first(c10d::Store& store, const std::string& key, const std::string& text) {
  try {
    return store.compareSet(key, "", text);
  } catch (const c10::NotImplementedError&) {
    // The store is of a class of the user's own: c10d's Store only has a stub.
    if (store.add("first/" + key, 1) > 1) return store.get_to_str(key);
    store.set(key, text);
    return text;
  }
}

}  // namespace

std::string record_failure(c10d::Store& store, const std::string& why) {
  return set_first(store, kFailure, why);
}

std::optional<std::string> read_failure(c10d::Store& store) {
  if (!store.check({kFailure})) return std::nullopt;
  return store.get_to_str(kFailure);
}

void record_reader(c10d::Store& store, int rank) { store.set(reader_key(rank), std::string("1")); }

bool have_read(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(reader_key(rank));
  return keys.empty() || store.check(keys);
}

void record_attempt(c10d::Store& store, const FailedAttempt& attempt) {
  const auto text = serialize(attempt);
  if (set_first(store, ddp::str("attempt/", attempt.group, '/', attempt.number), text) != text)
    return;
  store.set(entry_key(store.add(kCount, 1)), text);
}

void read_attempts(c10d::Store& store, std::vector<FailedAttempt>& known) {
  if (!store.check({kCount})) return;
  const auto count = store.add(kCount, 0);
  for (auto entry = static_cast<int64_t>(known.size()) + 1; entry <= count; ++entry) {
    if (!store.check({entry_key(entry)})) return;  // about to be set
    known.push_back(parse_attempt(store.get_to_str(entry_key(entry))));
  }
}

}  // namespace ddp
