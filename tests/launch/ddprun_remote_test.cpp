// ddprun -H, with a script in place of ssh that starts the hosts' commands on this one.
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include <ddp/internal/system/host.h>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using Words = std::vector<std::string>;

namespace {

const std::string kSayPid = "echo pid $$ launcher $PPID; ";

/// A program that is called as ssh is: HOST COMMAND.
class FakeRsh {
 public:
  /// \param script  what it does; by default it becomes the host's ddprun, as ssh does at the other
  /// end.
  explicit FakeRsh(const std::string& script = "exec sh -c \"$*\"\n")
      : path_(folder_.write("rsh", "#!/bin/sh\nhost=$1\nshift\n" + script)) {
    ::chmod(path_.c_str(), 0755);
  }
  const std::string& path() const { return path_; }

 private:
  TemporaryFolder folder_;
  std::string path_;
};

/// `options` and a script of two ranks on one host, and one on the other.
Words on_hosts(const FakeRsh& rsh, Words options, const std::string& script) {
  const Words hosts = {"-H", "127.0.0.1:2,localhost:1", "--rsh", rsh.path()};
  options.insert(options.begin(), hosts.begin(), hosts.end());
  return ddprun_sh(options, script);
}

void wait_until_gone(const std::string& out) {
  const auto pids = numbers_after(out, " pid ");
  CHECK(pids.size() == 3);
  for (const int pid : pids) {
    CAPTURE(pid);
    CHECK(eventually([&] { return is_gone(pid); }));
  }
}

}  // namespace

TEST_CASE("hosts with different numbers of ranks make one world", "[process]") {
  const FakeRsh rsh;
  const std::string restarts = GENERATE("0", "1");  // alone, and with a coordinator
  const Ended job =
      run(on_hosts(
              rsh, {"--max-restarts", restarts},
              "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE "
              "$MASTER_ADDR $DDP_TEST_WORD in $(pwd -P) port $MASTER_PORT"),
          [] {
            ProcessOptions options;
            options.environment = {"DDP_TEST_WORD=two  words"};
            return options;
          }());
  CAPTURE(job.out, job.err);
  CHECK(job.code == 0);
  CHECK(job.err.empty());
  const auto ports = numbers_after(job.out, " port ");
  REQUIRE(ports.size() == 3);
  CHECK(ports[0] > 0);
  CHECK(ports == std::vector<int>(3, ports[0]));
  char* here = ::realpath(".", nullptr);
  const auto end = " in " + std::string(here) + " port " + std::to_string(ports[0]);
  ::free(here);
  CHECK(
      sorted_lines(job.out) == Words{
                                   "[0] 0/3 0/2 0/2 127.0.0.1 two words" + end,
                                   "[1] 1/3 1/2 0/2 127.0.0.1 two words" + end,
                                   "[2] 2/3 0/1 1/2 127.0.0.1 two words" + end});
}

TEST_CASE("arguments and variables reach the hosts as they are", "[process]") {
  const FakeRsh rsh;
  const std::string odd = "it's \"odd\" $HOME `pwd` \\ 雪 *\tx\n=y  ";
  auto command = on_hosts(rsh, {"-x", "OWN=" + odd}, "[ \"$1\" = \"$OWN\" ] && echo \"<$1>\" $#");
  command.insert(command.end(), {"sh", odd, ""});
  const Ended job = run(command);
  CAPTURE(job.err);
  CHECK(job.code == 0);
  for (const char* rank : {"[0] ", "[1] ", "[2] "}) {
    CHECK_THAT(
        job.out, ContainsText(rank + std::string("<it's \"odd\" $HOME `pwd` \\ 雪 *\tx\n")) &&
                     ContainsText(rank + std::string("=y  > 2\n")));
  }
}

TEST_CASE("the rank that fails on one host ends the others", "[process]") {
  const FakeRsh rsh;
  const std::string failing = GENERATE("0", "2");
  const Ended job =
      run(on_hosts(rsh, {}, kSayPid + "[ $RANK = " + failing + " ] && exit 7; exec sleep 100"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 7);
  CHECK_THAT(job.err, ContainsText("exited with code 7; ending 1 host\n"));
  CHECK(job.err.find("took too long") == std::string::npos);
  CHECK_THAT(
      job.err, ContainsText(
                   failing == "0" ? "ddprun: host 127.0.0.1 (node 0): "
                                  : "ddprun: host localhost (node 1): "));
}

TEST_CASE("all hosts start again after a failure", "[process]") {
  const FakeRsh rsh;
  const Ended job = run(on_hosts(
      rsh, {"--max-restarts", "1"},
      "echo attempt $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK != "
      "2 ] "
      "|| exit 7"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 0);
  for (const char* rank : {"[0]", "[1]", "[2]"}) {
    CHECK_THAT(job.out, ContainsText(rank + std::string(" attempt 1\n")));
  }
}

TEST_CASE("a signal to ddprun reaches the ranks of all hosts", "[process]") {
  const FakeRsh rsh;
  const int signal = GENERATE(SIGINT, SIGTERM, SIGHUP, SIGUSR1);
  CAPTURE(signal);
  Process job(on_hosts(
      rsh, {},
      "trap 'echo got one; exit 0' INT TERM HUP USR1; " + kSayPid + "while :; do sleep 0.1; done"));
  job.read_until(" pid ", 3);
  job.send(signal);
  job.read_until("got one", 3);
  const Ended ended = job.wait();
  CAPTURE(ended.out, ended.err);
  CHECK(ended.code == (signal == SIGUSR1 ? 0 : 128 + signal));
  wait_until_gone(ended.out);
}

TEST_CASE("after a notice the ranks of all hosts leave, each in its time", "[process]") {
  const FakeRsh rsh;
  Process job(on_hosts(
      rsh, {},
      "trap 'left=1' USR1; echo ready; until [ \"$left\" ]; do sleep 0.01; done; "
      "[ $GROUP_RANK = 0 ] || sleep 2; echo saved; exit 143"));
  job.read_until("ready", 3);
  job.send(SIGUSR1);
  const Ended ended = job.wait();
  CAPTURE(ended.out, ended.err);
  CHECK(ended.code == 143);
  CHECK_THAT(ended.err, ContainsText("; waiting for 1 host\n"));
  for (const char* rank : {"[0]", "[1]", "[2]"}) {
    CHECK_THAT(ended.out, ContainsText(rank + std::string(" saved\n")));
  }
}

TEST_CASE("nothing is left when a client or this ddprun is killed", "[process]") {
  // The client is not the host's ddprun, as with ssh; ssh_test.py has hosts that are no children of
  // this ddprun, too.
  const FakeRsh rsh(
      "exec 3<&0\n"
      "setsid sh -c \"$*\" <&3 3<&- &\n"
      "exec 3<&-; echo client $$; wait $!\n");
  const std::string killed = GENERATE("client", "ddprun");
  CAPTURE(killed);
  Process job(on_hosts(rsh, {}, kSayPid + "exec sleep 100"));
  job.read_until(" pid ", 3);
  const auto out = job.out();
  if (killed == "client") {
    ::kill(numbers_after(out, "client ").back(), SIGKILL);
  } else {
    job.send(SIGKILL);
  }
  const Ended ended = job.wait();
  CAPTURE(ended.out, ended.err);
  CHECK(ended.code == (killed == "client" ? 128 + SIGKILL : -SIGKILL));
  wait_until_gone(out);
}

TEST_CASE("where localhost is the first of several hosts, the others get its name", "[process]") {
  const FakeRsh rsh;
  const Ended job =
      run(ddprun_sh({"-H", "localhost:1,other:1", "--rsh", rsh.path()}, "echo at $MASTER_ADDR"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 0);
  const auto at = " at " + ddp::host_name();
  CHECK(sorted_lines(job.out) == Words{"[0]" + at, "[1]" + at});
}

TEST_CASE("a first host that ends as soon as it has named its port is followed", "[process]") {
  // The first client ends while ddprun is stopped, which then sees port and end at once.
  const FakeRsh rsh(
      "mkdir \"$0.first\" 2>/dev/null || exec sh -c \"$*\"\n"
      "kill -STOP $PPID; sh -c \"$*\"; code=$?\n"
      "(until grep -q '^State:.Z' /proc/$$/status; do sleep 0.01; done; kill -CONT $PPID) \\\n"
      "  </dev/null >/dev/null 2>&1 &\n"
      "exit $code\n");
  const Ended job = run(
      ddprun_sh({"-H", "a:1,b:1", "--master-addr", "localhost", "--rsh", rsh.path()}, "echo here"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 0);
  CHECK(sorted_lines(job.out) == Words{"[0] here", "[1] here"});
}

TEST_CASE("a client that passes no input on is told from a hang-up", "[process]") {
  const FakeRsh rsh("exec sh -c \"$*\" </dev/null\n");
  const Ended job = run(on_hosts(rsh, {}, "exec sleep 100"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 128 + SIGHUP);
  CHECK_THAT(
      job.err, ContainsText("ddprun: standard input has ended") &&
                   ContainsText("--rsh has to pass input on") && !ContainsText("got SIGHUP"));
}

TEST_CASE("a host whose input ends gets SIGHUP for its ranks", "[process]") {
  auto command = ddprun_sh(
      {"--obey-stdin", "-n", "2"}, "trap 'echo hup; exit 0' HUP; while :; do sleep 0.1; done");
  const Ended ended = run(command);  // its input is empty
  CAPTURE(ended.out, ended.err);
  CHECK(ended.code == 128 + SIGHUP);
}

TEST_CASE("a client that cannot reach its host ends the job with its code", "[process]") {
  const FakeRsh rsh(
      "[ $host = localhost ] && { echo cannot reach it >&2; exit 255; }\n"
      "exec sh -c \"$*\"\n");
  const Ended job = run(on_hosts(rsh, {"--max-restarts", "1"}, "exec sleep 100"));
  CAPTURE(job.out, job.err);
  CHECK(job.code == 255);
  CHECK_THAT(
      job.err, ContainsText("cannot reach it\n") && ContainsText("host localhost (node 1): "));

  const FakeRsh silent("exit 0\n");
  const Ended nothing = run(on_hosts(silent, {}, "exit 0"));
  CHECK(nothing.code == 1);
  CHECK_THAT(
      nothing.err, ContainsText("host 127.0.0.1 (node 0): ") && ContainsText("named a port"));

  const Ended none = run(ddprun({"-H", "a,b", "--rsh", "/no/such/rsh", "true"}));
  CHECK(none.code == 127);
  CHECK_THAT(none.err, ContainsText("cannot execute '/no/such/rsh'"));
}
