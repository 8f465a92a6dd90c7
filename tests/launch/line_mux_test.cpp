#include "launch/output/line_mux.h"

#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"

using ddp::launch::LineMux;

namespace {

/// A mux of two sources, and all output of it.
struct TwoRanks {
  explicit TwoRanks(size_t max_held = LineMux::kMaxHeld)
      : TwoRanks(LineMux::For::Terminal, max_held) {}
  explicit TwoRanks(LineMux::For reader, size_t max_held = LineMux::kMaxHeld)
      : mux(reader, max_held) {
    mux.add_source("[0] ");
    mux.add_source("[1] ");
  }
  TwoRanks& feed(int source, std::string_view bytes) {
    mux.feed(source, bytes, out);
    return *this;
  }
  TwoRanks& finish(int source) {
    mux.finish(source, out);
    return *this;
  }
  LineMux mux;
  std::string out;
};

}  // namespace

TEST_CASE("every line gets its source's prefix", "[pure]") {
  CHECK(TwoRanks().feed(0, "a\nb\n").feed(1, "c\n").out == "[0] a\n[0] b\n[1] c\n");
  CHECK(TwoRanks().feed(0, "\n\n").out == "[0] \n[0] \n");
  CHECK(TwoRanks().feed(0, "").finish(0).out == "");
}

TEST_CASE("a line that comes in parts leaves whole", "[pure]") {
  TwoRanks ranks;
  ranks.feed(0, "be").feed(1, "other\n").feed(0, "gin");
  CHECK(ranks.out == "[1] other\n");
  CHECK(ranks.feed(0, "\nrest").out == "[1] other\n[0] begin\n");
  CHECK(ranks.finish(0).out == "[1] other\n[0] begin\n[0] rest\n");
  // A rank's children may write after its end.
  CHECK(ranks.feed(0, "child\n").out == "[1] other\n[0] begin\n[0] rest\n[0] child\n");
}

TEST_CASE("bytes pass unchanged", "[pure]") {
  const std::string bytes("\0\xff\x1b[1m\t\0", 8);
  CHECK(TwoRanks().feed(0, bytes + "\n").out == "[0] " + bytes + "\n");
  CHECK(TwoRanks().feed(0, "dos\r\n").out == "[0] dos\r\n");
  CHECK(TwoRanks().feed(0, "dos\r").feed(0, "\n").out == "[0] dos\r\n");
}

TEST_CASE("a progress bar's frames are written as they come", "[pure]") {
  CHECK(TwoRanks().feed(0, "10%\r20%\r30%").out == "[0] 10%\r[0] 20%\r");
  // A frame at the end of a read waits for the byte that distinguishes it from "\r\n".
  CHECK(TwoRanks().feed(0, "10%\r").feed(0, "20%\r").out == "[0] 10%\r");
  CHECK(TwoRanks().feed(0, "10%\r").finish(0).out == "[0] 10%\r\n");
}

TEST_CASE("a file gets the last frame of each line, and no escape sequence", "[pure]") {
  using For = LineMux::For;
  CHECK(TwoRanks(For::File).feed(0, "10%\r20%\rdone\n").out == "[0] done\n");
  CHECK(TwoRanks(For::File).feed(0, "10%\r").feed(0, "20%\n").out == "[0] 20%\n");
  CHECK(TwoRanks(For::File).feed(0, "10%\r20%\r").finish(0).out == "[0] 20%\r\n");
  CHECK(TwoRanks(For::File).feed(0, "dos\r").feed(0, "\n").out == "[0] dos\r\n");
  CHECK(TwoRanks(For::File).feed(0, "\x1b[1").feed(0, "mbold\n").out == "[0] bold\n");
  CHECK(TwoRanks(For::File).feed(0, "10%\r").feed(1, "x\n").out == "[1] x\n");
}

TEST_CASE("another rank's line is never written into an open bar", "[pure]") {
  TwoRanks ranks;
  ranks.feed(0, "10%\r20%").feed(1, "hello\n").feed(0, "\rdone\n");
  CHECK(ranks.out == "[0] 10%\r\n[1] hello\n[0] 20%\r[0] done\n");
}

TEST_CASE("an overlong line stays whole while no other rank writes", "[pure]") {
  TwoRanks ranks(/*max_held=*/4);
  ranks.feed(0, "abcd");
  CHECK(ranks.out.empty());
  ranks.feed(0, "ef").feed(0, "ghijk").feed(0, "l\nm\n");
  CHECK(ranks.out == "[0] abcdefghijkl\n[0] m\n");
}

TEST_CASE("an overlong line is broken, with prefixes, when another rank writes", "[pure]") {
  TwoRanks ranks(/*max_held=*/4);
  ranks.feed(0, "abcdef").feed(1, "x\n").feed(0, "gh\n");
  CHECK(ranks.out == "[0] abcdef\n[1] x\n[0] gh\n");

  TwoRanks both(/*max_held=*/4);
  both.feed(0, "aaaaaa").feed(1, "bbbbbb").finish(0).finish(1);
  CHECK(both.out == "[0] aaaaaa\n[1] bbbbbb\n");
}

TEST_CASE("the lines do not depend on how the bytes are split", "[pure]") {
  std::mt19937 random(GENERATE(range(0, 50)));
  const std::string input = "one\ntwo\r\n\n25%\r50%\r\rthree, a longer one\nlast";
  const std::string whole = TwoRanks().feed(0, input).finish(0).out;

  TwoRanks cut;
  for (size_t at = 0; at < input.size();) {
    const size_t size = 1 + random() % 6;
    cut.feed(0, input.substr(at, size));
    at += size;
  }
  CHECK(cut.finish(0).out == whole);
}

TEST_CASE(
    "random output of several ranks: whole lines, in each rank's order, no byte lost", "[pure]") {
  std::mt19937 random(GENERATE(range(0, 20)));
  constexpr int kRanks = 4;
  LineMux mux;
  std::string out;
  std::vector<std::string> texts(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    mux.add_source("[" + std::to_string(rank) + "] ");
    for (int line = 0; line < 30; ++line) {
      texts[rank] += std::string(random() % 40, static_cast<char>('a' + rank)) + "\n";
    }
  }
  std::vector<size_t> fed(kRanks, 0);
  for (int step = 0; step < 5000; ++step) {
    const int rank = random() % kRanks;
    const std::string piece = texts[rank].substr(fed[rank], random() % 20);
    mux.feed(rank, piece, out);
    fed[rank] += piece.size();
  }
  std::vector<std::string> received(kRanks);
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    REQUIRE(line.size() >= 4);
    const int rank = line[1] - '0';
    REQUIRE(line.substr(0, 4) == "[" + std::to_string(rank) + "] ");
    received[rank] += line.substr(4) + "\n";
  }
  CHECK(received == texts);
}
