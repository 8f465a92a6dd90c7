#include "monitor/call_difference.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include <ddp/internal/text.h>

namespace ddp {
namespace {

// More calls than any group has made, and few enough that sums of numbers do not overflow.
constexpr uint64_t kMostCalls = uint64_t{1} << 62;
// How many calls a text shows before and after the first difference.
constexpr uint64_t kShown = 5;

std::string list_text(const CallList& list) {
  OutputText text;
  text << list.first << ' ' << list.calls.size();
  for (const auto& call : list.calls) {
    text << ' ' << int{static_cast<uint8_t>(call.kind)} << ' ' << int{call.dtype} << ' '
         << int{call.reduction} << ' ' << call.root << ' ' << call.tensors << ' ' << call.sizes
         << ' ' << call.numel;
  }
  return text.str();
}

// Returns nothing for a text that this version has not written.
std::optional<CallList> parse_list(const std::string& text) {
  CallList list;
  InputText fields(text);
  size_t count = 0;
  fields >> list.first >> count;
  for (size_t i = 0; i < count && fields; ++i) {
    int kind = 0, dtype = 0, reduction = 0;
    auto& call = list.calls.emplace_back();
    fields >> kind >> dtype >> reduction >> call.root >> call.tensors >> call.sizes >> call.numel;
    call.kind = static_cast<CollectiveKind>(kind);
    call.dtype = static_cast<int8_t>(dtype);
    call.reduction = static_cast<int8_t>(reduction);
    if (kind < 0 || kind > UINT8_MAX || !call.is_known()) return std::nullopt;
  }
  if (!fields || list.first > kMostCalls) return std::nullopt;
  return list;
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

std::string calls_from(const RankCalls& one, uint64_t number) {
  const auto left = one.calls.end() - std::min(one.calls.end(), number + kShown);
  return ddp::str(
      "rank ", one.rank, " called ", calls_between(one.calls, number, number + kShown),
      left > 0 ? ddp::str("; and ", left, " more") : "",
      one.where.empty() ? "" : ", and waits in " + one.where);
}

/// The step that one of two ranks ran more than the other: "" if they ran as many.
std::string likely_cause(const RankCalls& lower, const RankCalls& upper) {
  const bool lower_ran_more = lower.steps > upper.steps;
  const auto& more = lower_ran_more ? lower : upper;
  const auto& fewer = lower_ran_more ? upper : lower;
  if (lower.steps == upper.steps || more.steps_text.began.empty()) return "";
  return more.steps_text.explain(ddp::str("rank ", more.rank), ddp::str("rank ", fewer.rank));
}

}  // namespace

std::optional<CallDifference> find_call_difference(const std::vector<RankCalls>& ranks) {
  std::map<std::string, const RankCalls*> most;  // by list
  for (const auto& one : ranks) {
    const auto*& known = most[one.list];
    if (!known || known->calls.end() < one.calls.end()) known = &one;
  }
  for (const auto& one : ranks) {
    const auto& other = *most[one.list];
    const auto number = first_difference(one.calls, other.calls);
    if (!number) continue;
    const bool is_lower = one.rank < other.rank;
    return CallDifference{is_lower ? one : other, is_lower ? other : one, *number};
  }
  return std::nullopt;
}

std::string to_text(const CallDifference& difference) {
  const auto& [lower, upper, number] = difference;
  const auto begin = number - std::min(number, kShown);
  const auto before = calls_between(lower.calls, begin, number);
  return ddp::str(
      likely_cause(lower, upper), "process group \"", lower.group_name,
      "\": expected every rank to call the same collective number ", number, ", but rank ",
      lower.rank, " called ", to_text(lower.calls.at(number)), " and rank ", upper.rank, " ",
      to_text(upper.calls.at(number)),
      ". Call the same collectives with tensors of equal sizes and dtypes in the same order on all "
      "ranks. Their last calls: ",
      before.empty() ? "" : ddp::str("both called ", before, "; then "), calls_from(lower, number),
      "; ", calls_from(upper, number));
}

std::string to_text(const std::vector<RankCalls>& calls) {
  std::vector<std::string> texts;
  for (const auto& one : calls) {
    texts.push_back(packed(
        {one.list, one.group_name, one.where, ddp::str(one.steps), one.steps_text.began,
         one.steps_text.rule, list_text(one.calls)}));
  }
  return packed(texts);
}

std::vector<RankCalls> parse_calls(int rank, const std::string& text) {
  std::vector<RankCalls> calls;
  try {
    for (const auto& one : unpacked(text)) {
      const auto fields = unpacked(one);
      auto list = parse_list(fields.at(6));
      if (!list) return {};
      calls.push_back(
          {rank,
           fields[0],
           fields[1],
           fields[2],
           std::stoull(fields[3]),
           {fields[4], fields[5]},
           std::move(*list)});
    }
  } catch (const std::exception&) {
    return {};
  }
  return calls;
}

}  // namespace ddp
