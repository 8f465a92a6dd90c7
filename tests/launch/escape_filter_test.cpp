#include "launch/output/line_mux.h"

#include <string>

#include "support/catch.h"

using ddp::launch::EscapeFilter;

namespace {

std::string plain(const std::string& bytes) {
  std::string out;
  EscapeFilter().feed(bytes, out);
  return out;
}

}  // namespace

TEST_CASE("escape sequences are removed, and nothing else", "[pure]") {
  CHECK(plain("\x1b[1;31mred\x1b[0m\n") == "red\n");
  CHECK(plain("\x1b[2K\x1b[1Gback") == "back");
  CHECK(
      plain("\x1b]0;a title\a"
            "text") == "text");
  CHECK(plain("\x1b]8;;http://a.b\x1b\\link\x1b]8;;\x1b\\.") == "link.");
  CHECK(plain("\x1b(B\x1b=text\x1bM") == "text");
  const std::string bytes("a\0\xff\t\b[1m\r\n", 11);
  CHECK(plain(bytes) == bytes);
}

TEST_CASE("a sequence without an end removes only the rest of its line", "[pure]") {
  CHECK(plain("a\x1b[12\nb\n") == "a\nb\n");
  CHECK(plain("a\x1b]0;title\nb\n") == "a\nb\n");
  CHECK(plain("a\x1b") == "a");
}

TEST_CASE("a sequence may be cut anywhere", "[pure]") {
  const std::string bytes = "\x1b[1;31mred\x1b]0;t\x1b\\ and\x1b(B more\n";
  EscapeFilter filter;
  std::string out;
  for (const char byte : bytes) filter.feed({&byte, 1}, out);
  CHECK(out == "red and more\n");
}
