#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ddp::launch {

/// Removes terminals' escape sequences (colours, cursor movements, titles) from a stream of bytes.
/// A sequence may be split anywhere between two calls.
class EscapeFilter {
 public:
  /// Appends `bytes` without the sequences to `out`.
  void feed(std::string_view bytes, std::string& out);

 private:
  // ECMA-48: ESC [ parameters final; ESC ] text, ended by BEL or ESC \\; ESC byte.
  enum class State { Text, Escape, Control, String, StringEscape };

  static State after_escape(char byte);

  State state_ = State::Text;
};

/// Merges byte streams into one stream of whole lines, each with its source's prefix.
///
/// Writes a line when its newline has come. Two things are written earlier, so that neither a
/// progress bar is held back nor memory grows: a frame that ends in a carriage return, and a piece
/// of a line that exceeds `max_held`. Both leave the output's last line open. The open line
/// continues while its source is the only one that writes; before another source writes, it is
/// closed with a newline. So every line of the output belongs to one source, and bytes are only
/// ever added.
///
/// For a file or a pipe the lines are plain: without escape sequences, and only the last frame of a
/// line's progress bar.
class LineMux {
 public:
  static constexpr size_t kMaxHeld = size_t{1} << 24;

  enum class For { Terminal, File };

  /// \param max_held  bytes that one source's unfinished line may hold back, > 0.
  explicit LineMux(For reader = For::Terminal, size_t max_held = kMaxHeld)
      : reader_(reader), max_held_(max_held) {}

  /// \return the number that identifies the source for `feed` and `finish`.
  int add_source(std::string prefix);

  /// Takes bytes of one source and appends to `out` all that can be written now.
  void feed(int source, std::string_view bytes, std::string& out);

  /// Appends what `source` still holds, and ends its line. The source may be fed again.
  void finish(int source, std::string& out);

 private:
  struct Source {
    std::string prefix;
    EscapeFilter filter;
    std::string held;  // holds no newline, and a carriage return only as the last byte
  };
  static constexpr int kNoSource = -1;

  void take(int source, std::string_view bytes, std::string& out);
  void put_frame(int source, std::string_view bytes, std::string& out);
  void put(int source, std::string_view bytes, std::string& out);

  For reader_;
  size_t max_held_;
  std::vector<Source> sources_;
  int open_ = kNoSource;   // the source of the output's unfinished last line
  bool mid_line_ = false;  // the next bytes of the open line need no prefix
};

}  // namespace ddp::launch
