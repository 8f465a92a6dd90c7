#include <ddp/pipeline_stats.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include <ATen/core/functional.h>
#include <ddp/collectives.h>
#include <ddp/internal/text.h>
#include <ddp/internal/trace_events.h>

namespace ddp {
namespace {

// Numbers in the order of the fields: 17 digits are exact.
void write_pipeline_step(std::ostream& out, const PipelineStepStats& step) {
  out << step.rank << ' ' << step.step << ' ' << step.begin_unix_ns << ' ' << step.total_ms << ' '
      << step.actions.size();
  for (const auto& [action, stage, begin, end] : step.actions) {
    out << ' ' << action.kind << ' ' << action.chunk << ' ' << action.microbatch << ' ' << stage
        << ' ' << begin << ' ' << end;
  }
  out << '\n';
}

bool read_pipeline_step(std::istream& in, PipelineStepStats& step) {
  size_t actions = 0;
  in >> step.rank >> step.step >> step.begin_unix_ns >> step.total_ms >> actions;
  if (!in) return false;
  step.actions.resize(actions);
  for (auto& [action, stage, begin, end] : step.actions) {
    in >> action.kind >> action.chunk >> action.microbatch >> stage >> begin >> end;
  }
  return static_cast<bool>(in);
}

struct WholeStep {
  int ranks = 0;
  double busy_ms = 0;
  double longest_ms = 0;

  double bubble() const {
    return longest_ms > 0 ? 1 - busy_ms / (longest_ms * static_cast<double>(ranks)) : 0;
  }
};

std::vector<WholeStep> whole_steps(const PipelineStats& stats) {
  std::map<int64_t, WholeStep> by_number;
  for (const auto& step : stats.steps) {
    auto& whole = by_number[step.step];
    ++whole.ranks;
    whole.busy_ms += step.busy_ms();
    whole.longest_ms = std::max(whole.longest_ms, step.total_ms);
  }
  return c10::fmap(by_number, [](const auto& numbered) { return numbered.second; });
}

template <typename Value>
double middle_of(std::vector<WholeStep> steps, const Value& value) {
  if (steps.empty()) return 0;
  const auto middle = steps.begin() + static_cast<std::ptrdiff_t>(steps.size() / 2);
  std::nth_element(steps.begin(), middle, steps.end(), [&](const auto& a, const auto& b) {
    return value(a) < value(b);
  });
  return value(*middle);
}

}  // namespace

double PipelineStepStats::busy_ms() const {
  double busy = 0;
  for (const auto& action : actions) busy += action.end_ms - action.begin_ms;
  return busy;
}

double PipelineStats::bubble() const {
  return middle_of(whole_steps(*this), [](const WholeStep& step) { return step.bubble(); });
}

PipelineStats all_gather_stats(const PipelineStats& stats, const GroupArg& group) {
  OutputText text;
  text.precision(17);
  for (const auto& step : stats.steps) write_pipeline_step(text, step);
  PipelineStats all;
  for (const auto& of_rank : all_gather_strings(text.str(), group)) {
    InputText lines(of_rank);
    for (PipelineStepStats step; read_pipeline_step(lines, step);) all.steps.push_back(step);
  }
  return all;
}

std::string summary(const PipelineStats& stats) {
  if (stats.steps.empty()) return "";
  const auto total =
      middle_of(whole_steps(stats), [](const WholeStep& step) { return step.longest_ms; });
  return formatted("step %.1f ms, bubble %.1f%%", total, 100 * stats.bubble());
}

void write_trace(const std::string& path, const PipelineStats& stats) {
  constexpr int kProcess = 0;
  auto first_ns = std::numeric_limits<int64_t>::max();
  for (const auto& step : stats.steps) first_ns = std::min(first_ns, step.begin_unix_ns);
  const auto base_ns = stats.steps.empty() ? 0 : trace_base_ns(first_ns);
  TraceEvents events(path, base_ns);
  events.name("process_name", kProcess, 0, "pipeline");
  std::set<int64_t> named;
  for (const auto& step : stats.steps) {
    const double begin_us = static_cast<double>(step.begin_unix_ns - base_ns) / 1000;
    for (const auto& [action, stage, begin, end] : step.actions) {
      const auto row = static_cast<size_t>(stage);
      if (named.insert(stage).second) {
        events.name(
            "thread_name", kProcess, row, ddp::str("stage ", stage, " on rank ", step.rank));
      }
      events.span(
          ddp::str(action.kind, action.microbatch), kProcess, row, begin_us + begin * 1000,
          begin_us + end * 1000, "step", step.step);
    }
  }
  events.close();
}

}  // namespace ddp
