#include "monitor/failure_records.h"

#include <c10/util/Exception.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Keys of the store:
//   failure      why the job failed: the text of the first rank that failed
//   error/R      what threw on rank R; "": nothing since
//   reader/R     rank R has read the failure, or is not expected to
//   first/K      how many ranks have tried to be the first to set K, if there is no compareSet
constexpr const char* kFailure = "failure";

std::string error_key(int rank) { return ddp::str("error/", rank); }

std::string reader_key(int rank) { return ddp::str("reader/", rank); }

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

void record_error(c10d::Store& store, int rank, const std::string& why) {
  store.set(error_key(rank), why);
}

std::string read_errors(c10d::Store& store, const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    if (!store.check({error_key(rank)})) continue;
    const auto why = store.get_to_str(error_key(rank));
    if (!why.empty()) text += ddp::str(text.empty() ? "" : "; ", "rank ", rank, ": ", why);
  }
  return text;
}

void record_reader(c10d::Store& store, int rank) { store.set(reader_key(rank), std::string("1")); }

bool have_read(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(reader_key(rank));
  return keys.empty() || store.check(keys);
}

}  // namespace ddp
