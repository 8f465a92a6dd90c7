#include <algorithm>
#include <cmath>

#include <ddp/internal/text.h>

#include "key_averages.h"

namespace ddp::profiling {
namespace {

using Entry = KeyAverages::Entry;
constexpr size_t kColumnWidth = 12;
constexpr size_t kMaxNameWidth = 55;
constexpr size_t kMaxShapesWidth = 80;

std::string text_of_time(double us) {
  if (us >= 1e6) return formatted("%.3fs", us / 1e6);
  if (us >= 1e3) return formatted("%.3fms", us / 1e3);
  return formatted("%.3fus", us);
}

std::string text_of_share(double us, double total_us) {
  return total_us == 0 ? "NaN" : formatted("%.2f%%", us * 100.0 / total_us);
}

std::string text_of_memory(int64_t bytes) {
  constexpr double kKiB = 1024;
  const auto value = static_cast<double>(bytes);
  const double size = std::abs(value);
  if (size >= kKiB * kKiB * kKiB) return formatted("%.2f GB", value / (kKiB * kKiB * kKiB));
  if (size >= kKiB * kKiB) return formatted("%.2f MB", value / (kKiB * kKiB));
  if (size >= kKiB) return formatted("%.2f KB", value / kKiB);
  return std::to_string(bytes) + " B";
}

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

// Counts characters of UTF-8.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), begins_character));
}

std::string first_characters(const std::string& text, size_t count) {
  size_t seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (begins_character(text[i]) && seen++ == count) return text.substr(0, i);
  }
  return text;
}

/// Builds lines of cells that are right-aligned in their columns.
class TextTable {
 public:
  void add_column(const std::string& header, size_t width = kColumnWidth) {
    headers_.push_back(header);
    widths_.push_back(width);
  }
  void add_separator() {
    for (const size_t width : widths_) text_ += std::string(width, '-') + "  ";
    text_ += '\n';
  }
  void add_headers() { add_row(headers_); }
  void add_row(const std::vector<std::string>& cells) {
    for (size_t i = 0; i < cells.size(); ++i) {
      const size_t width = width_of(cells[i]);
      text_ += std::string(widths_[i] > width ? widths_[i] - width : 0, ' ') + cells[i] + "  ";
    }
    text_ += '\n';
  }
  void add_line(const std::string& line) { text_ += line + '\n'; }

  const std::string& text() const { return text_; }

 private:
  std::vector<std::string> headers_;
  std::vector<size_t> widths_;
  std::string text_;
};

struct Columns {
  bool device_time = false;
  bool memory = false;
  bool device_memory = false;
  bool shapes = false;
  size_t shapes_width = 0;
};

struct Sums {
  double cpu_us = 0;
  double device_us = 0;
};

Sums sums_of(const std::vector<const Entry*>& entries) {
  Sums sums;
  for (const auto* entry : entries) {
    sums.cpu_us += entry->self_cpu_time_total;
    const bool is_kernel = entry->device_type != c10::DeviceType::CPU && !entry->is_user_annotation;
    if (is_kernel) sums.device_us += entry->self_device_time_total;
  }
  return sums;
}

Columns columns_of(const KeyAverages& averages, const std::vector<const Entry*>& entries) {
  Columns columns;
  columns.memory = averages.profile_memory;
  for (const auto* entry : entries) {
    columns.device_time |= entry->self_device_time_total > 0;
    columns.device_memory |= entry->self_device_memory_usage > 0;
    columns.shapes |= !entry->input_shapes.empty();
    columns.shapes_width =
        std::max(columns.shapes_width, text_of_shapes(entry->input_shapes).size() + 4);
  }
  columns.shapes_width = std::min(columns.shapes_width, kMaxShapesWidth);
  columns.device_time &= !averages.device.empty();
  columns.device_memory &= !averages.device.empty() && averages.profile_memory;
  return columns;
}

void add_columns(
    TextTable& table, const Columns& columns, size_t name_width, const std::string& device) {
  table.add_column("Name", name_width);
  for (const char* header :
       {"Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"}) {
    table.add_column(header);
  }
  if (columns.device_time) {
    table.add_column("Self " + device);
    table.add_column("Self " + device + " %");
    table.add_column(device + " total");
    table.add_column(device + " time avg");
  }
  if (columns.memory) {
    table.add_column("CPU Mem");
    table.add_column("Self CPU Mem");
  }
  if (columns.device_memory) {
    table.add_column(device + " Mem");
    table.add_column("Self " + device + " Mem");
  }
  table.add_column("# of Calls");
  if (columns.shapes) table.add_column("Input Shapes", columns.shapes_width);
}

std::vector<std::string> row_of(const Entry& entry, const Columns& columns, const Sums& sums) {
  auto name = entry.name;
  if (width_of(name) >= kMaxNameWidth - 3) name = first_characters(name, kMaxNameWidth - 3) + "...";
  std::vector<std::string> cells = {
      name,
      text_of_share(entry.self_cpu_time_total, sums.cpu_us),
      text_of_time(entry.self_cpu_time_total),
      entry.is_async ? "0" : text_of_share(entry.cpu_time_total, sums.cpu_us),
      text_of_time(entry.cpu_time_total),
      text_of_time(entry.cpu_time())};
  if (columns.device_time) {
    cells.push_back(text_of_time(entry.self_device_time_total));
    cells.push_back(text_of_share(entry.self_device_time_total, sums.device_us));
    cells.push_back(text_of_time(entry.device_time_total));
    cells.push_back(text_of_time(entry.device_time()));
  }
  if (columns.memory) {
    cells.push_back(text_of_memory(entry.cpu_memory_usage));
    cells.push_back(text_of_memory(entry.self_cpu_memory_usage));
  }
  if (columns.device_memory) {
    cells.push_back(text_of_memory(entry.device_memory_usage));
    cells.push_back(text_of_memory(entry.self_device_memory_usage));
  }
  cells.push_back(std::to_string(entry.count));
  if (columns.shapes) {
    cells.push_back(text_of_shapes(entry.input_shapes).substr(0, columns.shapes_width));
  }
  return cells;
}

}  // namespace

std::string text_of_shapes(const std::vector<std::vector<int64_t>>& shapes) {
  std::string text = "[";
  for (const auto& shape : shapes) {
    if (text.size() > 1) text += ", ";
    text += '[';
    for (size_t i = 0; i < shape.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    }
    text += ']';
  }
  return text + "]";
}

std::string table_of(
    const KeyAverages& averages, const std::vector<const Entry*>& entries, int row_limit) {
  if (entries.empty()) return "";
  const auto columns = columns_of(averages, entries);
  const auto sums = sums_of(entries);
  size_t name_width = 0;
  for (const auto* entry : entries) name_width = std::max(name_width, width_of(entry->name) + 4);
  TextTable table;
  add_columns(table, columns, std::min(name_width, kMaxNameWidth), averages.device);
  table.add_separator();
  table.add_headers();
  table.add_separator();
  int rows = 0;
  for (const auto* entry : entries) {
    if (rows++ == row_limit) break;
    table.add_row(row_of(*entry, columns, sums));
  }
  table.add_separator();
  table.add_line("Self CPU time total: " + text_of_time(sums.cpu_us));
  if (columns.device_time) {
    table.add_line("Self " + averages.device + " time total: " + text_of_time(sums.device_us));
  }
  return table.text();
}

}  // namespace ddp::profiling
