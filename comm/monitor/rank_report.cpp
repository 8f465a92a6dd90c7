#include "monitor/rank_report.h"

#include <algorithm>
#include <exception>

#include <ATen/core/functional.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kSend = "send to ";
constexpr const char* kReceive = "recv from ";

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

std::string to_text(const BlockedRank& blocked) {
  if (blocked.waits.empty()) return "";
  std::vector<std::string> made, waits;
  for (const auto& [list, count] : blocked.made) {
    made.push_back(list);
    made.push_back(ddp::str(count));
  }
  for (const auto& wait : blocked.waits) {
    waits.push_back(packed({wait.list, ddp::str(wait.number), ddp::str(wait.needs), wait.text}));
  }
  return packed({packed(made), packed(waits)});
}

BlockedRank parse_blocked(const std::string& text) {
  BlockedRank blocked;
  const auto parts = unpacked(text);
  const auto made = unpacked(parts.at(0));
  for (size_t i = 0; i < made.size(); i += 2) blocked.made[made[i]] = std::stoull(made.at(i + 1));
  for (const auto& wait : unpacked(parts.at(1))) {
    const auto fields = unpacked(wait);
    blocked.waits.push_back(
        {fields.at(0), std::stoull(fields.at(1)), std::stoi(fields.at(2)), fields.at(3)});
  }
  return blocked;
}

}  // namespace

std::string to_text(const RankReport& report) {
  return ddp::str(
      report.address, '\t', report.group, '\t', report.where, '\t', report.steps, ' ', report.calls,
      '\t', report.group_name, '\t', to_text(report.blocked));
}

RankReport parse_report(const std::string& text) {
  RankReport report;
  InputText fields(text);
  std::getline(fields, report.address, '\t');
  std::getline(fields, report.group, '\t');
  std::getline(fields, report.where, '\t');
  std::string blocked;
  if (!(fields >> report.steps)) return report;
  if (fields.get() == ' ') {
    fields >> report.calls;
    fields.get();  // a tab
  }
  std::getline(fields, report.group_name, '\t');
  std::getline(fields, blocked, '\0');
  try {
    if (!blocked.empty()) report.blocked = parse_blocked(blocked);
  } catch (const std::exception&) {
    // Another program's.
  }
  return report;
}

std::string report_key(int rank) { return ddp::str("report/", rank); }

std::string calls_key(int rank) { return ddp::str("calls/", rank); }

std::vector<RankReport> read_reports(c10d::Store& store, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(report_key(rank));
  return c10::fmap(store.multiGet(keys), [](const auto& value) {
    return parse_report({value.begin(), value.end()});
  });
}

std::optional<UnevenSteps> find_uneven_steps(
    const std::vector<RankReport>& ranks, const std::string& group) {
  std::optional<uint64_t> most, least;
  const auto waits_here = [&](const RankReport& rank) {
    return !rank.where.empty() && rank.group == group;
  };
  for (const auto& rank : ranks) {
    if (!waits_here(rank)) continue;
    most = std::max(most.value_or(rank.steps), rank.steps);
    least = std::min(least.value_or(rank.steps), rank.steps);
  }
  if (most == least) return std::nullopt;
  UnevenSteps uneven;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!waits_here(ranks[i])) continue;
    if (ranks[i].steps == *most) uneven.more.push_back(i);
    if (ranks[i].steps == *least) uneven.fewer.push_back(i);
  }
  return uneven;
}

std::string message_place(bool sends, std::optional<int> peer, int tag) {
  const auto other = peer ? ddp::str("rank ", *peer) : std::string("any rank");
  return ddp::str(sends ? kSend : kReceive, other, " with tag ", tag);
}

bool is_message_place(const std::string& where) {
  return begins_with(where, kSend) || begins_with(where, kReceive);
}

std::string advice_for_message(const std::string& where, const std::string& others) {
  const bool both_send = begins_with(where, kSend) && others.find(kSend) != std::string::npos;
  return both_send ? ". A send ends once it is received: receive first on one of them, or start "
                     "the sends with send_async or batch_isend_irecv"
                   : "";
}

}  // namespace ddp
