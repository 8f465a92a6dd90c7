#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "launch/escape_filter.h"

namespace ddp::launch {

/// Merges byte streams into one stream of whole lines, each with its source's prefix.
///
/// A line leaves when its newline has come. Two things leave earlier, so that neither a progress
/// bar is held back nor memory grows: a frame that ends in a carriage return, and a piece of a
/// line that exceeds `max_held`. Both leave the output's last line open; it is continued as long
/// as its source is the only one to speak, and closed with a newline before another one does.
/// So every line of the output belongs to one source, and bytes are only ever added.
///
/// For a file or a pipe the lines are plain: without escape sequences, and of a progress bar's
/// frames only the one that the line ends with.
class LineMux {
 public:
  static constexpr size_t kMaxHeld = size_t{1} << 24;

  enum class For { Terminal, File };

  /// \param max_held  bytes that one source's unfinished line may hold back, > 0.
  explicit LineMux(For reader = For::Terminal, size_t max_held = kMaxHeld)
      : reader_(reader), max_held_(max_held) {}

  /// \return the number by which `feed` and `finish` know the source.
  int add_source(std::string prefix);

  /// Takes bytes of one source and appends to `out` what is due.
  void feed(int source, std::string_view bytes, std::string& out);

  /// Appends what `source` still holds, and ends its line. The source may be fed again.
  void finish(int source, std::string& out);

 private:
  struct Source {
    std::string prefix;
    EscapeFilter filter;
    std::string held;  // no newline in it, and a carriage return only as the last byte
  };
  static constexpr int kNobody = -1;

  void take(int source, std::string_view bytes, std::string& out);
  void put_frame(int source, std::string_view bytes, std::string& out);
  void put(int source, std::string_view bytes, std::string& out);

  For reader_;
  size_t max_held_;
  std::vector<Source> sources_;
  int open_ = kNobody;     // whose line the output's last one is, if it is unfinished
  bool mid_line_ = false;  // of the open line: its next bytes need no prefix
};

}  // namespace ddp::launch
