#include "examples/common/progress.h"

#include <fcntl.h>
#include <unistd.h>

#include <sstream>

#include "support/catch.h"

namespace {

using examples::Progress;

std::string shown(Progress::Style style) {
  std::ostringstream out;
  Progress progress(out, style);
  progress.step("epoch 1/2", 11, 22);
  progress.line("loss 0.5");
  progress.step("epoch 2/2", 22, 22);
  return out.str();
}

}  // namespace

TEST_CASE("a file or pipe gets only the lines", "[examples][pure]") {
  CHECK(shown(Progress::Style::kLines) == "loss 0.5\n");
}

TEST_CASE("a terminal gets the bar, and lines above it", "[examples][pure]") {
  CHECK(
      shown(Progress::Style::kBar) ==
      "\r\033[Kepoch 1/2 [###############...............] 11/22"
      "\r\033[Kloss 0.5\n"
      "\r\033[Kepoch 2/2 [##############################] 22/22");
}

TEST_CASE("ranks other than 0 are silent", "[examples][pure]") {
  CHECK(shown(Progress::Style::kSilent).empty());
}

TEST_CASE("the style depends on the rank and on the output", "[examples][pure]") {
  const int file = open("/dev/null", O_WRONLY);
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  CHECK(Progress::choose(0, file) == Progress::Style::kLines);
  CHECK(Progress::choose(0, terminal) == Progress::Style::kBar);
  CHECK(Progress::choose(1, terminal) == Progress::Style::kSilent);
  close(file);
  close(terminal);
}
