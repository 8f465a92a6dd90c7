#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace examples {

/// Shows rank 0's training progress: lines, and on a terminal a moving bar below them.
class Progress {
 public:
  enum class Style {
    kSilent,  // the other ranks
    kLines,   // a file or a pipe
    kBar,     // a terminal
  };

  /// Returns kBar when `out` is a terminal (file descriptor `fd`), else kLines; kSilent except on
  /// rank 0.
  static Style choose(int rank, int fd);

  /// \param out  must outlive this object.
  Progress(std::ostream& out, Style style) : out_(out), style_(style) {}

  /// Shows it in another style from now on: of a rank that has become another one.
  void restyle(Style style) { style_ = style; }

  /// Prints a line, above the bar.
  void line(const std::string& text);

  /// Moves the bar to `done` of `total` steps.
  void step(const std::string& label, int64_t done, int64_t total);

 private:
  std::ostream& out_;
  Style style_;
};

}  // namespace examples
