#include <ddp/reduction_stats.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <utility>

#include <ATen/core/functional.h>
#include <ddp/collectives.h>
#include <ddp/internal/text.h>
#include <ddp/internal/trace_events.h>

#include "stats/times.h"

namespace ddp {
namespace {

// Numbers in the order of the fields: 17 digits are exact.
void write_step(std::ostream& out, const StepStats& step) {
  out << step.rank << ' ' << step.step << ' ' << step.begin_us << ' ' << step.begin_unix_ns << ' '
      << step.step_ms << ' ' << step.forward_ms << ' ' << step.compute_ms << ' ' << step.total_ms
      << ' ' << step.data_ms << ' ' << step.inter_host_ms << ' ' << step.intra_host_ms << ' '
      << step.communication_ms << ' ' << step.exposed_ms << ' '
      << step.device_utilization.value_or(-1) << ' ' << step.bytes << ' ' << step.buckets.size();
  for (const auto& bucket : step.buckets) {
    out << ' ' << bucket.bytes << ' ' << bucket.ready_ms << ' ' << bucket.launched_ms << ' '
        << bucket.done_ms;
  }
  out << '\n';
}

bool read_step(std::istream& in, StepStats& step) {
  size_t buckets = 0;
  int utilization = -1;
  in >> step.rank >> step.step >> step.begin_us >> step.begin_unix_ns >> step.step_ms >>
      step.forward_ms >> step.compute_ms >> step.total_ms >> step.data_ms >> step.inter_host_ms >>
      step.intra_host_ms >> step.communication_ms >> step.exposed_ms >> utilization >> step.bytes >>
      buckets;
  if (!in) return false;
  step.device_utilization = utilization < 0 ? std::nullopt : std::optional(utilization);
  step.buckets.resize(buckets);
  for (auto& bucket : step.buckets) {
    in >> bucket.bytes >> bucket.ready_ms >> bucket.launched_ms >> bucket.done_ms;
  }
  return static_cast<bool>(in);
}

double median_of(
    const std::vector<StepStats>& steps, const std::function<double(const StepStats&)>& value) {
  return median(c10::fmap(steps, value));
}

int64_t first_ns(const std::vector<StepStats>& steps) {
  if (steps.empty()) return 0;
  const auto first = std::min_element(steps.begin(), steps.end(), [](const auto& a, const auto& b) {
    return a.begin_unix_ns < b.begin_unix_ns;
  });
  return first->begin_unix_ns;
}

// The computation has the first track, and each bucket one.
std::string name_of_track(size_t track) {
  return track == 0 ? "computation" : "bucket " + std::to_string(track - 1);
}

void add_step(TraceEvents& events, const StepStats& step, int64_t base_ns) {
  const double begin_us = static_cast<double>(step.begin_unix_ns - base_ns) / 1000;
  const auto at = [&](double ms) { return begin_us + ms * 1000; };
  const auto span = [&](const std::string& name, size_t track, double begin, double end,
                        int64_t bytes) {
    events.span(name, step.rank, track, at(begin), at(end), "bytes", bytes);
  };
  const auto number = ddp::str(" ", step.step);
  span("forward" + number, 0, 0, step.forward_ms, 0);
  span("backward" + number, 0, step.forward_ms, step.compute_ms, 0);
  span("wait for buckets" + number, 0, step.compute_ms, step.total_ms, step.bytes);
  for (size_t b = 0; b < step.buckets.size(); ++b) {
    const auto& bucket = step.buckets[b];
    if (bucket.launched_ms < 0) continue;
    span(name_of_track(b + 1), b + 1, bucket.launched_ms, bucket.done_ms, bucket.bytes);
  }
}

// The thresholds of docs/tuning.md.
std::string verdict(double communication, double overlap) {
  constexpr double kFew = 0.2, kMany = 0.4, kHidden = 0.7;
  std::string text = communication < kFew    ? "communication is good (below 20%)"
                     : communication > kMany ? "look at communication (above 40%)"
                                             : "communication is fair (20% to 40%)";
  text += overlap > kHidden ? ", overlap is good (above 0.7)" : ", overlap is low (up to 0.7)";
  return text;
}

std::string summary_of_device(const std::vector<StepStats>& steps) {
  std::vector<double> known;
  for (const auto& step : steps) {
    if (step.device_utilization) known.push_back(*step.device_utilization);
  }
  if (known.empty()) return "";
  return formatted("; the GPU is busy %.0f%% of the time", median(std::move(known)));
}

std::string summary_of_stragglers(const std::vector<Straggler>& stragglers) {
  std::string text;
  for (const auto& [rank, what, factor] : stragglers) {
    text += formatted("; rank %d is slow in ", rank) + what + formatted(" (%.2f times)", factor);
  }
  return text;
}

std::string summary_of_tuning(const BucketCapTuning& tuning) {
  auto text = formatted("; bucket_cap_mb tuned to %.3g", tuning.cap_mb);
  const char* before = ": step";
  const auto add = [&](const char* form, double ms) {
    if (ms <= 0) return;
    text += before + formatted(form, ms);
    before = ",";
  };
  add(" predicted %.1f ms", tuning.predicted_ms);
  add(" measured %.1f ms", tuning.measured_ms);
  return text;
}

// Steps before the last rebuild had other buckets, or sent all gradients in one piece for the
// tuner.
std::vector<StepStats> steps_as_they_are_now(const ReductionStats& stats) {
  std::vector<StepStats> steps;
  std::copy_if(
      stats.steps.begin(), stats.steps.end(), std::back_inserter(steps),
      [&](const StepStats& step) { return step.step > stats.rebuilt_at; });
  return steps.empty() ? stats.steps : steps;
}

}  // namespace

ReductionStats all_gather_stats(const ReductionStats& stats, const GroupArg& group) {
  OutputText text;
  text.precision(17);
  for (const auto& step : stats.steps) write_step(text, step);
  ReductionStats all = stats;
  all.steps.clear();
  for (const auto& of_rank : all_gather_strings(text.str(), group)) {
    InputText lines(of_rank);
    for (StepStats step; read_step(lines, step);) all.steps.push_back(step);
  }
  return all;
}

std::string summary(const ReductionStats& stats) {
  if (stats.steps.empty()) return "";
  const auto steps = steps_as_they_are_now(stats);
  const double step =
      median_of(steps, [](const auto& s) { return s.step_ms > 0 ? s.step_ms : s.total_ms; });
  const double exposed = median_of(steps, [](const auto& s) { return s.exposed_ms; });
  const double communication = median_of(steps, [](const auto& s) { return s.communication_ms; });
  const double overlap = median_of(steps, [](const auto& s) { return s.overlap(); });
  const auto share_of_step = [&](double ms) { return step > 0 ? ms / step : 0; };
  auto text = formatted(
      "step %.1f ms, communication %.1f ms (%.0f%% of the step, %.0f%% not hidden), overlap %.2f",
      step, communication, 100 * share_of_step(communication), 100 * share_of_step(exposed),
      overlap);
  const double backward =
      median_of(steps, [](const auto& s) { return s.compute_ms - s.forward_ms; });
  text += "; " + verdict(share_of_step(communication), overlap) +
          formatted(", backward takes %.0f%%", 100 * share_of_step(backward));
  text += summary_of_device(steps);
  text += summary_of_stragglers(stats.stragglers);
  if (stats.tuning) text += summary_of_tuning(*stats.tuning);
  return text;
}

void write_trace(const std::string& path, const ReductionStats& stats) {
  const int64_t base_ns = trace_base_ns(first_ns(stats.steps));
  TraceEvents events(path, base_ns);
  std::map<int, size_t> tracks;  // by rank: the number of tracks that have a name
  for (const auto& step : stats.steps) {
    auto& named = tracks[step.rank];
    if (named == 0) events.name("process_name", step.rank, 0, "rank " + std::to_string(step.rank));
    for (; named <= step.buckets.size(); ++named) {
      events.name("thread_name", step.rank, named, name_of_track(named));
    }
    add_step(events, step, base_ns);
  }
  events.close();
}

}  // namespace ddp
