#include "result.h"

#include <cmath>
#include <cstdio>

namespace ddp_bench {
namespace {

std::string number(double value, const char* format) {
  if (!std::isfinite(value)) return "null";  // JSON has no other word for it
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string milliseconds(double value) { return number(value, "%.4f"); }

}  // namespace

std::string json_string(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      quoted += escaped;
      continue;
    }
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

std::string to_json(const Result& r) {
  const auto field = [](const char* name, const std::string& value) {
    return json_string(name) + ":" + value;
  };
  std::string line = "{";
  line += field("model", json_string(r.model)) + "," + field("mode", json_string(r.mode)) + "," +
          field("backend", json_string(r.backend)) + "," + field("world", std::to_string(r.world)) +
          "," + field("bucket_cap_mb", r.bucket_cap_mb ? number(*r.bucket_cap_mb, "%g") : "null") +
          "," + field("step_ms", milliseconds(r.step_ms)) + "," +
          field("step_ms_p10", milliseconds(r.step_ms_p10)) + "," +
          field("step_ms_p90", milliseconds(r.step_ms_p90)) + "," +
          field("compute_ms", milliseconds(r.compute_ms)) + "," +
          field("comm_ms", milliseconds(r.comm_ms)) + "," +
          field("overlap", milliseconds(r.overlap)) + "," +
          field("bytes", std::to_string(r.bytes)) + "," +
          field("checksum", number(r.checksum, "%.17g")) + "}";
  return line;
}

}  // namespace ddp_bench
