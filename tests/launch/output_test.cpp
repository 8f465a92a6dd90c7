#include "launch/output.h"

#include <string>
#include <string_view>

#include <unistd.h>

#include "launch/fd.h"
#include "support/catch.h"

using ddp::launch::Fd;
using ddp::launch::make_pipe;
using ddp::launch::Output;
using ddp::launch::Pipe;

namespace {

void write_to(const Fd& fd, std::string_view text) {
  REQUIRE(::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

/// Plays the reader of `pipe`, until all is written.
std::string read_all(Output& output, const Pipe& pipe) {
  std::string received;
  char buffer[10000];
  do {
    output.copy();
    for (ssize_t count; (count = ::read(pipe.read.get(), buffer, sizeof(buffer))) > 0;) {
      received.append(buffer, count);
    }
  } while (!output.flushed());
  return received;
}

}  // namespace

TEST_CASE("a rank's last words come before its report, even to a slow reader", "[process]") {
  Pipe pipe = make_pipe();
  ddp::launch::set_nonblocking(pipe.read);
  Output output(pipe.write.get(), pipe.write.get());
  const auto ends = output.add_rank(7);
  // More than a pipe (64 KiB) and ddprun's queue (1 MiB) hold, by less than another pipe: ddprun
  // holds back, and does not even look at stderr.
  constexpr int kLines = 115;
  const std::string line(10000, '.');
  for (int i = 0; i < kLines; ++i) {
    write_to(ends.out, line + "\n");
    output.copy();
  }
  write_to(ends.err, "last words");
  output.copy();

  output.drain(0);
  output.say("rank 7 has died");
  const std::string received = read_all(output, pipe);
  const std::string end = "\n[7] last words\nddprun: rank 7 has died\n";
  REQUIRE(received.size() > end.size());
  CHECK(received.substr(received.size() - end.size()) == end);
  CHECK(received.size() == kLines * (4 + line.size() + 1) + end.size() - 1);
}

TEST_CASE("a rank's end closes its streams", "[process]") {
  Pipe pipe = make_pipe();
  ddp::launch::set_nonblocking(pipe.read);
  Output output(pipe.write.get(), pipe.write.get());
  auto ends = output.add_rank(0);
  std::vector<pollfd> waited;
  output.add_to(waited);
  CHECK(waited.size() == 2);
  ends = {};
  CHECK(read_all(output, pipe).empty());
  waited.clear();
  output.add_to(waited);
  CHECK(waited.empty());
}
