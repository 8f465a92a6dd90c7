#include "progress.h"

#include <unistd.h>

namespace examples {
namespace {

constexpr int64_t kBarWidth = 30;
constexpr const char* kEraseLine = "\r\033[K";

}  // namespace

Progress::Style Progress::choose(int rank, int fd) {
  if (rank != 0) return Style::kSilent;
  return isatty(fd) != 0 ? Style::kBar : Style::kLines;
}

void Progress::line(const std::string& text) {
  if (style_ == Style::kSilent) return;
  if (style_ == Style::kBar) out_ << kEraseLine;
  out_ << text << '\n' << std::flush;
}

void Progress::step(const std::string& label, int64_t done, int64_t total) {
  if (style_ != Style::kBar) return;
  const auto filled = static_cast<size_t>(kBarWidth * done / total);
  out_ << kEraseLine << label << " [" << std::string(filled, '#')
       << std::string(kBarWidth - filled, '.') << "] " << done << '/' << total << std::flush;
}

}  // namespace examples
