#include "launch/pretend/report.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <map>
#include <utility>

#include <ddp/internal/text.h>

#include "launch/pretend/meetings.h"
#include "launch/pretend/rank_list.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

// Faults that follow from one mistake are alike.
constexpr size_t kShownFaults = 20;

using Row = std::vector<std::string>;

/// Columns, of which the first ones go to the left.
std::string aligned(const std::vector<Row>& rows, size_t left) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += "  " + (i < left ? row[i] + space : space + row[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

/// Milliseconds, to the microsecond.
std::string ms_text(double seconds) {
  OutputText text;
  text << std::setprecision(15) << std::round(1e6 * seconds) / 1e3;
  return text.str();
}

std::string step_text(const CallList& list, const StepOfList& step) {
  if (step.number < 0) return "the whole run, without steps";
  const bool is_whole = step.end < list.events.size();
  return str("step ", step.number, is_whole ? "" : ", up to the end");
}

std::string memory_text(const CallList& list) {
  if (list.memory.empty()) return "";
  std::vector<Row> rows{{"memory", "own peak", "at the peak of all"}};
  for (const auto& [kind, memory] : list.memory) {
    rows.push_back({kind, mib_text(memory.peak), mib_text(memory.at_peak)});
  }
  rows.push_back({"all tensors", "", mib_text(list.peak)});
  if (list.process_peak > 0) rows.push_back({"the process", mib_text(list.process_peak), ""});
  return aligned(rows, 1);
}

std::string calls_text(const CallList& list, const StepOfList& step) {
  const auto sums = calls_by_kind(list, step);
  if (sums.empty()) return "  no calls\n";
  std::vector<Row> rows{{"axis", "kind", "ranks", "calls", "bytes"}};
  for (const auto& sum : sums) {
    rows.push_back({sum.axis, sum.kind, str(sum.ranks), str(sum.calls), str(sum.bytes)});
  }
  return aligned(rows, 2);
}

std::string json_of_memory(const CallList& list, int64_t KindOfMemory::*which) {
  std::vector<std::string> parts;
  for (const auto& [kind, memory] : list.memory) {
    parts.push_back(str(json_text(kind), ": ", memory.*which));
  }
  return "{" + joined_by(", ", parts) + "}";
}

/// The keys of one rank, without braces.
std::string json_of_rank(const CallsReport& report, size_t i) {
  const auto& list = report.lists[i];
  const auto& step = report.steps[i];
  std::vector<std::string> calls;
  for (const auto& sum : calls_by_kind(list, step)) {
    calls.push_back(str(
        "{\"axis\": ", json_text(sum.axis), ", \"kind\": ", json_text(sum.kind),
        ", \"ranks\": ", sum.ranks, ", \"calls\": ", sum.calls, ", \"bytes\": ", sum.bytes, "}"));
  }
  auto text =
      str("\"rank\": ", list.rank, ", \"step\": ", step.number,
          ", \"peak_bytes\": ", json_of_memory(list, &KindOfMemory::peak),
          ", \"bytes_at_peak\": ", json_of_memory(list, &KindOfMemory::at_peak),
          ", \"total_peak_bytes\": ", list.peak, ", \"process_bytes\": ", list.process_peak,
          ", \"collectives\": [", joined_by(", ", calls),
          "], \"compute_ms\": ", ms_text(seconds_of_computing(list, step)));
  if (!list.error.empty()) text += ", \"ended_by\": " + json_text(list.error);
  if (report.step_seconds) {
    text += str(", \"step_ms\": ", ms_text(report.seconds_of_ranks[i]));
  }
  return text;
}

std::string json_of_faults(const std::vector<OrderFault>& faults) {
  std::vector<std::string> parts;
  for (const auto& fault : faults) {
    parts.push_back(
        str("{\"kind\": ", json_text(name_of(fault.kind)), ", \"ranks\": [",
            joined_by(", ", fault.ranks), "], \"group\": ", json_text(fault.group),
            ", \"place\": ", json_text(fault.place), ", \"step\": ", fault.step,
            ", \"text\": ", json_text(fault.text), "}"));
  }
  return "[" + joined_by(", ", parts) + "]";
}

std::vector<int> ranks_of(const std::vector<CallList>& lists) {
  std::vector<int> ranks;
  for (const auto& list : lists) ranks.push_back(list.rank);
  return ranks;
}

}  // namespace

CallsReport make_report(std::vector<CallList> lists, const std::optional<Links>& links) {
  CallsReport report;
  report.lists = std::move(lists);
  const auto meetings = find_meetings(report.lists);
  report.steps = last_whole_steps(report.lists);
  report.faults = check_order(report.lists, meetings);
  const auto run = replay(report.lists, meetings, report.steps, links);
  report.chain = run.chain;
  for (const auto& rank : run.ranks) report.seconds_of_ranks.push_back(rank.step_seconds);
  if (links && !report.lists.empty() && run.all_ended()) {
    const auto& seconds = report.seconds_of_ranks;
    report.step_seconds = *std::max_element(seconds.begin(), seconds.end());
  }
  return report;
}

std::string text_of(const CallsReport& report) {
  OutputText text;
  const auto& first = report.lists.front();
  for (size_t i = 0; i < report.lists.size(); ++i) {
    const auto& list = report.lists[i];
    const auto& step = report.steps[i];
    text << "rank " << list.rank << " of " << list.world_size << ", " << step_text(list, step);
    if (!list.is_complete) {
      text << (list.error.empty() ? "; its list does not end" : "; it ended by: " + list.error);
    }
    text << '\n'
         << memory_text(list) << calls_text(list, step) << "  computation "
         << ms_text(seconds_of_computing(list, step)) << " ms";
    if (report.step_seconds) {
      text << ", the step with its calls " << ms_text(report.seconds_of_ranks[i]) << " ms";
    }
    text << '\n';
  }
  text << "the longest chain of calls of the step that depend on each other: " << report.chain.calls
       << ", with " << report.chain.rounds << " messages one after the other\n";
  for (const auto& line : lines_of_faults(report.faults)) text << line << '\n';
  if (report.faults.empty() && report.lists.size() > 1) {
    text << "the calls of " << short_ranks_text(ranks_of(report.lists)) << " of "
         << first.world_size << " meet, in one order\n";
  }
  return text.str();
}

std::string json_of(const CallsReport& report) {
  const auto& lists = report.lists;
  auto text = str("{\"world_size\": ", lists.front().world_size, ", ");
  if (lists.size() == 1) {
    text += json_of_rank(report, 0);
  } else {
    std::vector<std::string> ranks;
    for (size_t i = 0; i < lists.size(); ++i) ranks.push_back("{" + json_of_rank(report, i) + "}");
    text += str("\"ranks\": [\n  ", joined_by(",\n  ", ranks), "\n]");
    if (report.step_seconds) text += str(", \"step_ms\": ", ms_text(*report.step_seconds));
  }
  return text + str(", \"chain\": {\"calls\": ", report.chain.calls,
                    ", \"messages\": ", report.chain.rounds,
                    "}, \"faults\": ", json_of_faults(report.faults), "}\n");
}

std::string json_of_failed(const CallsReport& report, int exit_code) {
  return str("{\"exit_code\": ", exit_code, ", \"faults\": ", json_of_faults(report.faults), "}\n");
}

std::vector<std::string> lines_of_faults(const std::vector<OrderFault>& faults) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < std::min(faults.size(), kShownFaults); ++i) {
    lines.push_back("order: " + faults[i].text);
  }
  if (faults.size() > kShownFaults) {
    lines.push_back(str("order: and ", faults.size() - kShownFaults, " more; --json has all"));
  }
  return lines;
}

}  // namespace ddp::launch
