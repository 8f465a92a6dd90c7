#include "launch/output/output.h"

#include <algorithm>
#include <string>
#include <string_view>

#include <unistd.h>

#include "launch/pipe.h"
#include "support/catch.h"

using ddp::Fd;
using ddp::launch::make_pipe;
using ddp::launch::Output;
using ddp::launch::Pipe;

namespace {

void write_to(const Fd& fd, std::string_view text) {
  REQUIRE(::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

/// Reads `pipe` until all is written.
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

TEST_CASE("a rank's last output comes before its report, even with a slow reader", "[process]") {
  Pipe pipe = make_pipe();
  ddp::launch::set_nonblocking(pipe.read);
  Output output(pipe.write.get(), pipe.write.get());
  const auto ends = output.add_rank(7);
  // Fills the pipe until nothing is read any more: ddprun then stops reading, also from stderr.
  ddp::launch::set_nonblocking(ends.out);
  const std::string line = std::string(10000, '.') + "\n";
  size_t written = 0;
  for (;;) {
    const auto rest = std::string_view(line).substr(written % line.size());
    const ssize_t count = ::write(ends.out.get(), rest.data(), rest.size());
    if (count <= 0) break;
    written += static_cast<size_t>(count);
    output.copy();
  }
  REQUIRE(written > size_t{1} << 20);
  write_to(ends.err, "last words");
  output.copy();

  output.drain(0);
  output.say("rank 7 has died");
  const std::string received = read_all(output, pipe);
  const std::string end = "\n[7] last words\nddprun: rank 7 has died\n";
  REQUIRE(received.size() > end.size());
  CHECK(received.substr(received.size() - end.size()) == end);
  const auto dots = std::count(received.begin(), received.end(), '.');
  CHECK(static_cast<size_t>(dots) == written - written / line.size());
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
