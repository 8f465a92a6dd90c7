#include "call_records.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Ranks that put their records into the store at the same time come after each other. A rank that
// has lost so often compares itself again when it has waited twice as long.
constexpr int kMostTries = 4;
// More than any group has had: so that sums of numbers do not overflow.
constexpr uint64_t kMostCalls = uint64_t{1} << 62;
// How many calls before and behind the first difference a text has.
constexpr uint64_t kShown = 5;

std::string key_of(CallHistory::Lane lane) {
  return lane == CallHistory::Lane::kCpu ? "calls" : "calls_on_devices";
}

std::string serialize(const CallRecord& record) {
  OutputText text;
  text << record.rank << ' ' << record.attempts << ' ' << record.list.first << ' '
       << record.list.calls.size();
  for (const auto& call : record.list.calls) {
    text << ' ' << int{static_cast<uint8_t>(call.kind)} << ' ' << int{call.dtype} << ' '
         << int{call.reduction} << ' ' << call.root << ' ' << call.tensors << ' ' << call.sizes
         << ' ' << call.numel;
  }
  text << ' ' << record.where;
  return text.str();
}

// Nothing for what this version has not written: the store is open to strangers.
std::optional<CallRecord> parse(const std::string& text) {
  CallRecord record;
  InputText fields(text);
  size_t count = 0;
  fields >> record.rank >> record.attempts >> record.list.first >> count;
  for (size_t i = 0; i < count && fields; ++i) {
    int kind = 0, dtype = 0, reduction = 0;
    auto& call = record.list.calls.emplace_back();
    fields >> kind >> dtype >> reduction >> call.root >> call.tensors >> call.sizes >> call.numel;
    call.kind = static_cast<CollectiveKind>(kind);
    call.dtype = static_cast<int8_t>(dtype);
    call.reduction = static_cast<int8_t>(reduction);
    if (kind < 0 || kind > UINT8_MAX || !call.is_known()) return std::nullopt;
  }
  if (!fields || record.list.first > kMostCalls) return std::nullopt;
  fields.get();  // a space
  std::getline(fields, record.where, '\0');
  return record;
}

// Puts `text` under `key` where `expected` stands ("": nothing). What stands afterwards.
std::string replace(
    c10d::Store& store, const std::string& key, const std::string& expected,
    const std::string& text) {
  try {
    return store.compareSet(key, expected, text);
  } catch (const c10::NotImplementedError&) {
    // A class of the user's own: c10d's Store has only a stub. What another rank sets in between is
    // lost, until that rank compares itself again.
    auto stands = store.check({key}) ? store.get_to_str(key) : "";
    if (stands != expected) return stands;
    store.set(key, text);
    return text;
  }
}

std::optional<uint64_t> first_difference(const CallList& a, const CallList& b) {
  const auto end = std::min(a.end(), b.end());
  for (auto number = std::max(a.first, b.first); number < end; ++number) {
    if (a.at(number) != b.at(number)) return number;
  }
  return std::nullopt;
}

// "15 barrier; 16 all_reduce of 10 x Float, SUM".
std::string calls_between(const CallList& list, uint64_t begin, uint64_t end) {
  std::string text;
  for (auto number = std::max(begin, list.first); number < std::min(end, list.end()); ++number) {
    text += ddp::str(text.empty() ? "" : "; ", number, ' ', to_text(list.at(number)));
  }
  return text;
}

std::string from_there(const CallRecord& record, uint64_t number) {
  const auto left = record.list.end() - std::min(record.list.end(), number + kShown);
  return ddp::str(
      "rank ", record.rank, " called ", calls_between(record.list, number, number + kShown),
      left > 0 ? ddp::str("; and ", left, " more") : "",
      record.where.empty() ? "" : ", and waits in " + record.where);
}

}  // namespace

std::optional<Desync> compare_calls(
    c10d::Store& store, CallHistory::Lane lane, const CallRecord& own) {
  const auto key = key_of(lane);
  const auto text = serialize(own);
  std::string expected;
  for (int tries = 0; tries < kMostTries; ++tries) {
    const auto stands = replace(store, key, expected, text);
    if (stands == text) return std::nullopt;
    if (auto other = parse(stands)) {
      if (const auto number = first_difference(other->list, own.list)) {
        const bool is_lower = own.rank < other->rank;
        return is_lower ? Desync{own, std::move(*other), *number}
                        : Desync{std::move(*other), own, *number};
      }
      if (own.list.end() <= other->list.end()) return std::nullopt;
    }
    expected = stands;
  }
  return std::nullopt;
}

std::string to_text(const Desync& desync) {
  const auto& [lower, upper, number] = desync;
  const auto begin = number - std::min(number, kShown);
  const auto before = calls_between(lower.list, begin, number);
  return ddp::str(
      "expected every rank to call the same collective number ", number, ", but rank ", lower.rank,
      " called ", to_text(lower.list.at(number)), " and rank ", upper.rank, " ",
      to_text(upper.list.at(number)),
      ". Call the same collectives with tensors of equal sizes and dtypes in the same order on all "
      "ranks. Their last calls: ",
      before.empty() ? "" : ddp::str("both called ", before, "; then "), from_there(lower, number),
      "; ", from_there(upper, number));
}

}  // namespace ddp
