// Ranks write to pseudo-terminals: when lines appear, and what a file gets of them.
#include <csignal>
#include <cstdlib>
#include <string>

#include <unistd.h>

#include "launch/pipe.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;

namespace {

/// A folder for the files that probes create after they have written.
class Marks {
 public:
  Marks() {
    char name[] = "/tmp/ddp-test-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = name;
  }
  ~Marks() { run({"rm", "-r", folder_}); }
  Marks(const Marks&) = delete;
  Marks& operator=(const Marks&) = delete;

  std::string of(const std::string& rank) const { return folder_ + "/" + rank; }

 private:
  std::string folder_;
};

/// Containers may lack /dev/pts; ddprun falls back to pipes there.
bool are_there_terminals() {
  const bool there = ddp::launch::make_pseudo_terminal().has_value();
  if (!there) WARN("not tried: this system has no pseudo-terminals");
  return there;
}

ProcessOptions on_terminal(int columns) {
  ProcessOptions options;
  options.join_streams = true;
  options.terminal_columns = columns;
  return options;
}

}  // namespace

TEST_CASE("a rank's lines appear while it runs", "[process]") {
  if (!are_there_terminals()) return;
  const Marks marks;
  auto options = GENERATE(ProcessOptions(), on_terminal(80));
  Process job(
      ddprun_sh({"-n", "2"}, "exec " LINE_PROBE " " + marks.of("$RANK") + " wait"), options);
  job.read_until("last line\n", 2);
  CHECK_THAT(job.out(), ContainsText("[0] first line\n") && ContainsText("[1] first line\n"));
}

TEST_CASE("no line of any rank is lost with a crash", "[process]") {
  if (!are_there_terminals()) return;
  const Marks marks;
  const std::string end = GENERATE("abort", "segv", "kill", "exit");
  CAPTURE(end);
  // Rank 1 crashes after rank 0 has written; SIGTERM then ends rank 0.
  const Ended job = run(ddprun_sh(
      {"-n", "2"}, "[ $RANK = 0 ] && exec " LINE_PROBE " " + marks.of("0") +
                       " wait; while ! [ -e " + marks.of("0") +
                       " ]; do :; done; ulimit -c 0; exec " LINE_PROBE " " + marks.of("1") + " " +
                       end));
  CHECK(job.code != 0);
  for (const std::string rank : {"[0] ", "[1] "}) {
    CHECK_THAT(job.out, ContainsText(rank + "first line\n") && ContainsText(rank + "last line\n"));
    CHECK_THAT(job.err, ContainsText(rank + "a warning\n"));
  }
}

TEST_CASE("a rank's terminal is as wide as ddprun's less the prefix", "[process]") {
  if (!are_there_terminals()) return;
  auto options = on_terminal(100);
  Process job(
      ddprun_sh({"-n", "1"}, "stty -F /dev/stdout size; printf '\\033[1mbold\\033[0m\\n'"),
      options);
  const Ended ended = job.wait();
  CHECK(ended.out == "[0] 25 96\n[0] \x1b[1mbold\x1b[0m\n");
}

TEST_CASE("the ranks' terminals become wider with ddprun's", "[process]") {
  if (!are_there_terminals()) return;
  Process job(
      ddprun_sh({"-n", "1"}, "echo ready; until stty size <&2 | grep -w 196; do sleep 0.01; done"),
      on_terminal(100));
  job.read_until("ready\n");
  job.resize_terminal(200);
  CHECK(job.wait().out == "[0] ready\n[0] 25 196\n");
}

TEST_CASE("a file and a pipe get plain lines", "[process]") {
  const std::string script =
      "printf '\\033[1mbold\\033[0m\\n10%%\\r20%%\\r'; printf 'done\\r\\n'; printf 'bar\\r'";
  const std::string plain = "[0] bold\n[0] done\r\n[0] bar\r\n";
  CHECK(run(ddprun_sh({"-n", "1"}, script)).out == plain);

  const Marks marks;
  const std::string file = marks.of("output");
  std::string command;
  for (const auto& word : ddprun_sh({"-n", "1"}, script)) {
    command += "'";
    for (const char c : word) command += c == '\'' ? std::string("'\\''") : std::string(1, c);
    command += "' ";
  }
  CHECK(run({"sh", "-c", command + ">" + file}).code == 0);
  CHECK(read_bytes(file) == plain);
}

TEST_CASE("a system without pseudo-terminals gives ranks pipes", "[process]") {
  if (run({"unshare", "--mount", "true"}).code != 0) {
    WARN("not tried: it takes root to hide /dev/pts");
    return;
  }
  std::string command = "mount -t tmpfs none /dev/pts && exec ";
  for (const auto& word : ddprun({"-n", "1", "readlink", "/proc/self/fd/1"})) {
    command += "'" + word + "' ";
  }
  const Ended job = run({"unshare", "--mount", "sh", "-c", command});
  CHECK(job.code == 0);
  CHECK_THAT(job.out, ContainsText("[0] pipe:["));
}
