#include "metrics/prometheus_text.h"

#include <string_view>

namespace ddp {
namespace {

bool is_prometheus_character(char c) {
  return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '_' ||
         c == ':';
}

std::string label_text(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\' || c == '"') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

}  // namespace

std::string prometheus_name(const std::string& name) {
  std::string own;
  for (const char c : name) {
    const bool is_continued = (static_cast<unsigned char>(c) & 0xC0U) == 0x80U;  // of UTF-8
    if (is_continued) continue;
    own += is_prometheus_character(c) ? c : '_';
  }
  if (own.empty() || ('0' <= own[0] && own[0] <= '9')) own.insert(0, "_");
  return own;
}

std::string prometheus_text(const std::map<std::string, MetricPoint>& latest) {
  std::map<std::string, std::string> gauges;  // their lines, by name
  for (const auto& [name, point] : latest) {
    const auto own = prometheus_name(name);
    auto& lines = gauges[own];
    lines += own;
    if (own != name) lines += "{name=\"" + label_text(name) + "\"}";
    lines += ' ' + number_text(point.value, {"NaN", "+Inf", "-Inf"}) + '\n';
  }
  constexpr const char* kStepName = "ddp_metric_step";
  for (const auto& [name, point] : latest) {
    gauges[kStepName] += std::string(kStepName) + "{metric=\"" + label_text(name) + "\"} " +
                         std::to_string(point.step) + '\n';
  }
  std::string text;
  for (const auto& [name, lines] : gauges) text += "# TYPE " + name + " gauge\n" + lines;
  return text;
}

}  // namespace ddp
