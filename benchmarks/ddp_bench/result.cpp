#include "result.h"

#include <cmath>
#include <cstdio>

#include <ddp/internal/text.h>

namespace ddp_bench {
namespace {

std::string number(double value, const char* format) {
  if (!std::isfinite(value)) return "null";  // JSON has no NaN or infinity
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string decimals(double value) { return number(value, "%.4f"); }

std::string field(const std::string& name, const std::string& value) {
  return ddp::json_text(name) + ":" + value;
}

std::string share(double value) { return number(value, "%.5f"); }

// "ratio", "ratio_low" and "ratio_high", the ends of its interval, and "ratio_of_rounds"
std::string ratio_fields(const std::string& name, const PairedRatio& ratio) {
  std::string rounds;
  for (const double value : ratio.of_rounds) rounds += (rounds.empty() ? "" : ",") + share(value);
  const auto& interval = ratio.interval;
  return field(name, share(ratio.median)) + "," +
         field(name + "_low", interval ? share(interval->low) : "null") + "," +
         field(name + "_high", interval ? share(interval->high) : "null") + "," +
         field(name + "_of_rounds", "[" + rounds + "]");
}

std::string cpu_fields(const CpuTime& cpu) {
  return field("cpu_ms", decimals(cpu.ms)) + "," + ratio_fields("cpu_ratio", cpu.ratio);
}

}  // namespace

std::string to_json(const Result& r) {
  std::string line = "{";
  line += field("model", ddp::json_text(r.model)) + "," + field("mode", ddp::json_text(r.mode)) +
          "," + field("backend", ddp::json_text(r.backend)) + "," +
          field("world", std::to_string(r.world)) + "," +
          field("bucket_cap_mb", r.bucket_cap_mb ? number(*r.bucket_cap_mb, "%g") : "null") + "," +
          field("step_ms", decimals(r.step_ms)) + "," +
          field("step_ms_p10", decimals(r.step_ms_p10)) + "," +
          field("step_ms_p90", decimals(r.step_ms_p90)) + "," + ratio_fields("ratio", r.ratio) +
          "," + cpu_fields(r.cpu) + "," + field("compute_ms", decimals(r.compute_ms)) + "," +
          field("comm_ms", decimals(r.comm_ms)) + "," + field("overlap", decimals(r.overlap)) +
          "," + field("bytes", std::to_string(r.bytes)) + "," +
          field("checksum", number(r.checksum, "%.17g")) + "}";
  return line;
}

std::string to_json(const MemoryResult& r) {
  return "{" + field("model", ddp::json_text(r.model)) + "," +
         field("mode", ddp::json_text(r.mode)) + "," + field("backend", ddp::json_text(r.backend)) +
         "," + field("world", std::to_string(r.world)) + "," +
         field("bytes", std::to_string(r.bytes)) + "," +
         field("peak_bytes", std::to_string(r.peak.own())) + "," +
         field("anonymous_bytes", std::to_string(r.peak.anonymous)) + "," +
         field("shared_bytes", std::to_string(r.peak.shared)) + "," +
         field("file_bytes", std::to_string(r.peak.file)) + "}";
}

std::string to_json(const TensorParallelResult& r) {
  auto line = "{" + field("model", ddp::json_text("linear_layers")) + "," +
              field("mode", ddp::json_text(r.mode)) + "," +
              field("backend", ddp::json_text(r.backend)) + "," +
              field("world", std::to_string(r.world)) + "," + field("step_ms", decimals(r.step_ms));
  if (r.speedup) {
    line += "," + ratio_fields("speedup", *r.speedup) + "," +
            field("messages_ms", decimals(r.messages_ms)) + "," +
            field("messages_share", share(r.messages_ms / r.step_ms));
  }
  return line + "}";
}

std::string to_json(const FullyShardedResult& r) {
  const auto line = "{" + field("model", ddp::json_text("equal_layers")) + "," +
                    field("mode", ddp::json_text(r.mode)) + "," +
                    field("backend", ddp::json_text(r.backend)) + "," +
                    field("world", std::to_string(r.world)) + "," +
                    field("bytes", std::to_string(r.bytes)) + ",";
  if (r.peak_bytes > 0) {
    return line + field("peak_bytes", std::to_string(r.peak_bytes)) + "," +
           field("rest_bytes", std::to_string(r.rest_bytes)) + "}";
  }
  return line + field("step_ms", decimals(r.step_ms)) + "," + ratio_fields("ratio", r.ratio) + "," +
         cpu_fields(r.cpu) + "}";
}

std::string to_json(const PipelineResult& r) {
  auto line = "{" + field("model", ddp::json_text("equal_stages")) + "," +
              field("mode", ddp::json_text(r.mode)) + "," +
              field("schedule", ddp::json_text(r.schedule)) + "," +
              field("backend", ddp::json_text(r.backend)) + "," +
              field("world", std::to_string(r.world)) + "," +
              field("microbatches", std::to_string(r.microbatches)) + "," +
              field("step_ms", decimals(r.step_ms));
  if (r.speedup) line += "," + ratio_fields("speedup", *r.speedup);
  if (r.mode != "one_rank") {
    line += "," + field("bubble", number(r.bubble, "%.4f")) + "," +
            field("ideal_bubble", number(r.ideal_bubble, "%.4f")) + "," +
            field("ideal_ms", decimals(r.ideal_ms));
  }
  return line + "}";
}

}  // namespace ddp_bench
