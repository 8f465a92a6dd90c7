#include "monitor/compare_calls.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/text.h>

#include "store/compare_set.h"

namespace ddp {
namespace {

// Ranks that write their records into the store at the same time compete. A rank that has lost this
// often compares its calls again after it has waited twice as long.
constexpr int kMostTries = 4;
// More calls than any group has made, and few enough that sums of numbers do not overflow.
constexpr uint64_t kMostCalls = uint64_t{1} << 62;
// How many calls a text shows before and after the first difference.
constexpr uint64_t kShown = 5;

std::string key_of(CallHistory::Lane lane) {
  return lane == CallHistory::Lane::kCpu ? "calls" : "calls_on_devices";
}

std::string serialize(const CallRecord& record) {
  OutputText text;
  text << record.rank << ' ' << record.steps << ' ' << record.list.first << ' '
       << record.list.calls.size();
  for (const auto& call : record.list.calls) {
    text << ' ' << int{static_cast<uint8_t>(call.kind)} << ' ' << int{call.dtype} << ' '
         << int{call.reduction} << ' ' << call.root << ' ' << call.tensors << ' ' << call.sizes
         << ' ' << call.numel;
  }
  text << ' ' << record.where;
  return text.str();
}

// Returns nothing for a text that this version has not written: other programs can write to the
// store.
std::optional<CallRecord> parse_record(const std::string& text) {
  CallRecord record;
  InputText fields(text);
  size_t count = 0;
  fields >> record.rank >> record.steps >> record.list.first >> count;
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

std::string calls_from(const CallRecord& record, uint64_t number) {
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
    const auto current = compare_set(store, key, expected, text);
    if (current == text) return std::nullopt;
    if (auto other = parse_record(current)) {
      if (const auto number = first_difference(other->list, own.list)) {
        const bool is_lower = own.rank < other->rank;
        return is_lower ? Desync{own, std::move(*other), *number}
                        : Desync{std::move(*other), own, *number};
      }
      if (own.list.end() <= other->list.end()) return std::nullopt;
    }
    expected = current;
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
      before.empty() ? "" : ddp::str("both called ", before, "; then "), calls_from(lower, number),
      "; ", calls_from(upper, number));
}

}  // namespace ddp
