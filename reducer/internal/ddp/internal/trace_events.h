// Traces for chrome://tracing and ui.perfetto.dev.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <locale>
#include <string>

#include <ddp/internal/check.h>

namespace ddp {

/// The beginning of a trace's times. Kineto counts them from a multiple of three months, so that a
/// double holds them with their nanoseconds.
inline int64_t trace_base_ns(int64_t first_ns) {
  constexpr int64_t kMultiple = int64_t{7'889'238} * 1'000'000'000;
  return first_ns - first_ns % kMultiple;
}

class TraceEvents {
 public:
  TraceEvents(std::string path, int64_t base_ns) : path_(std::move(path)), out_(path_) {
    out_.imbue(std::locale::classic());
    out_.precision(17);
    out_ << R"({"displayTimeUnit":"ms","baseTimeNanoseconds":)" << base_ns << R"(,"traceEvents":[)";
  }

  /// \param what  "process_name" or "thread_name".
  void name(const char* what, int process, size_t track, const std::string& name) {
    next() << R"({"ph":"M","name":")" << what << R"(","pid":)" << process << R"(,"tid":)" << track
           << R"(,"args":{"name":")" << name << R"("}})";
  }

  /// \param argument, value  shown beside it.
  void span(
      const std::string& name, int process, size_t track, double begin_us, double end_us,
      const char* argument, int64_t value) {
    next() << R"({"ph":"X","name":")" << name << R"(","pid":)" << process << R"(,"tid":)" << track
           << R"(,"ts":)" << begin_us << R"(,"dur":)" << std::max(end_us - begin_us, 0.0)
           << R"(,"args":{")" << argument << R"(":)" << value << "}}";
  }

  /// \throws c10::Error  when the file could not be written.
  void close() {
    out_ << "\n]}\n";
    out_.close();
    DDP_CHECK(
        out_, "write_trace: expected to write ", path_, ", but could not. Is the folder there?");
  }

 private:
  std::ostream& next() {
    out_ << (first_ ? "\n" : ",\n");
    first_ = false;
    return out_;
  }

  const std::string path_;
  std::ofstream out_;
  bool first_ = true;
};

}  // namespace ddp
