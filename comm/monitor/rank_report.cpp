#include "monitor/rank_report.h"

#include <exception>
#include <vector>

#include <ddp/internal/packed_texts.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

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
      report.address, '\t', report.group, '\t', report.where, '\t', report.steps, '\t',
      report.group_name, '\t', to_text(report.blocked));
}

RankReport parse_report(const std::string& text) {
  RankReport report;
  InputText fields(text);
  std::getline(fields, report.address, '\t');
  std::getline(fields, report.group, '\t');
  std::getline(fields, report.where, '\t');
  std::string blocked;
  if (!(fields >> report.steps)) return report;
  fields.get();  // a tab
  std::getline(fields, report.group_name, '\t');
  std::getline(fields, blocked, '\0');
  try {
    if (!blocked.empty()) report.blocked = parse_blocked(blocked);
  } catch (const std::exception&) {
    // Another program's.
  }
  return report;
}

}  // namespace ddp
