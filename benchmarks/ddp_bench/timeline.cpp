#include "timeline.h"

#include <cstdio>
#include <utility>

#include <ddp/collectives.h>
#include <ddp/internal/text.h>

#include "benchmarks/ddp_bench/engines/ddp_engine.h"
#include "result.h"

namespace ddp_bench {
namespace {

std::string span_json(const Span& span) {
  char numbers[128];
  std::snprintf(
      numbers, sizeof numbers, "\"start_ms\":%.4f,\"end_ms\":%.4f,\"bytes\":%lld", span.start_ms,
      span.end_ms, static_cast<long long>(span.bytes));
  return "{\"track\":" + ddp::json_text(span.track) + ",\"name\":" + ddp::json_text(span.name) +
         "," + numbers + "}";
}

std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ",") + item;
  return "[" + text + "]";
}

}  // namespace

std::vector<Span> record_step(Task task, ddp::DistributedDataParallelOptions options, int warmup) {
  DdpEngine engine(std::move(task), options.stats_every(1));
  for (int step = 0; step < warmup; ++step) engine.step();
  ddp::barrier(options.process_group());
  const auto times = engine.step();

  const auto at = [&](Clock::time_point time) { return milliseconds(times.start, time); };
  std::vector<Span> spans = {
      {"compute", "forward", 0, at(times.forward)},
      {"compute", "backward", at(times.forward), at(times.backward)},
      {"compute", "optimizer", at(times.backward), at(times.end)}};
  const auto seen = engine.stats().steps.back();
  // The wrapper's step begins in its forward, on the same clock.
  const double begin = seen.begin_us / 1000 - milliseconds({}, times.start);
  for (size_t i = 0; i < seen.buckets.size(); ++i) {
    const auto& bucket = seen.buckets[i];
    spans.push_back(
        {"communication", "bucket " + std::to_string(i), begin + bucket.launched_ms,
         begin + bucket.done_ms, bucket.bytes});
  }
  return spans;
}

std::string timeline_json(
    const std::string& model, const std::vector<Span>& spans, const ddp::ProcessGroup& group) {
  std::vector<std::string> mine;
  for (const auto& span : spans) mine.push_back(span_json(span));
  return "{\"model\":" + ddp::json_text(model) +
         ",\"mode\":\"ddp\",\"world\":" + std::to_string(group->getSize()) +
         ",\"ranks\":" + joined(ddp::all_gather_strings(joined(mine), group)) + "}";
}

}  // namespace ddp_bench
