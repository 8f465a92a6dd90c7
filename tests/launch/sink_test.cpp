#include "launch/output/output.h"

#include <cerrno>
#include <csignal>
#include <string>

#include <unistd.h>

#include "launch/pipe.h"
#include "support/catch.h"

using ddp::launch::make_pipe;
using ddp::launch::Pipe;
using ddp::launch::Sink;

TEST_CASE(
    "a sink writes as much as its reader takes, and reports when it has too much", "[process]") {
  Pipe pipe = make_pipe();
  ddp::launch::set_nonblocking(pipe.read);
  Sink sink(pipe.write.get());
  const int source = sink.add_source("> ");
  std::string expected;
  while (!sink.full()) {
    REQUIRE(expected.size() < (size_t{4} << 20));
    const std::string line = std::to_string(expected.size()) + std::string(1000, '.') + "\n";
    sink.feed(source, line);
    sink.write_ready();  // returns although the reader does not read
    expected += "> " + line;
  }
  CHECK(expected.size() > (size_t{1} << 20));

  std::string received;
  char buffer[10000];
  while (!sink.empty()) {
    const ssize_t count = ::read(pipe.read.get(), buffer, sizeof(buffer));
    REQUIRE(count > 0);
    received.append(buffer, count);
    sink.write_ready();
  }
  for (ssize_t count; (count = ::read(pipe.read.get(), buffer, sizeof(buffer))) > 0;) {
    received.append(buffer, count);
  }
  CHECK(received == expected);
  CHECK_FALSE(sink.full());
  CHECK(sink.error() == 0);
}

TEST_CASE("a sink whose reader has left keeps nothing", "[process]") {
  ::signal(SIGPIPE, SIG_IGN);
  Pipe pipe = make_pipe();
  pipe.read.reset();
  Sink sink(pipe.write.get());
  const int source = sink.add_source("> ");
  sink.feed(source, "a\n");
  CHECK(sink.error() == 0);
  sink.write_ready();
  CHECK(sink.error() == EPIPE);
  sink.feed(source, "b\n");
  CHECK(sink.empty());
  ::signal(SIGPIPE, SIG_DFL);
}
