// The environment, descriptors and signals with which a rank starts.
#include <sys/stat.h>

#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using Lines = std::vector<std::string>;

TEST_CASE("a rank's environment names its rank, the world and the master", "[process]") {
  const std::string script =
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $KEPT";
  ProcessOptions options;
  options.environment = {"KEPT=kept", "RANK=9", "WORLD_SIZE=1"};
  const std::vector<std::string> two = GENERATE(Lines{"-n", "2"}, Lines{"-n", "2", "--standalone"});
  const Ended job = run(ddprun_sh(two, script), options);
  CHECK(job.code == 0);
  CHECK(job.err.empty());
  CHECK(
      sorted_lines(job.out) ==
      Lines{"[0] 0 0 2 2 0 127.0.0.1 kept", "[1] 1 1 2 2 0 127.0.0.1 kept"});
}

TEST_CASE("the second of three hosts starts the ranks in the middle", "[process]") {
  const Ended job = run(ddprun_sh(
      {"-n", "2", "--nnodes", "3", "--node-rank", "1", "--master-addr", "host0", "--master-port",
       "29500"},
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE "
      "$MASTER_ADDR:$MASTER_PORT"));
  CHECK(job.code == 0);
  CHECK(sorted_lines(job.out) == Lines{"[2] 2 0 6 1/3 host0:29500", "[3] 3 1 6 1/3 host0:29500"});
}

TEST_CASE("OMP_NUM_THREADS is the user's, or an even share", "[process]") {
  ProcessOptions unset;
  unset.environment = {"OMP_NUM_THREADS"};
  const auto shares = numbers_after(
      run(ddprun_sh({"-n", "1"}, "echo omp $OMP_NUM_THREADS of $(nproc)"), unset).out, "omp ");
  const auto cores = numbers_after(run({"nproc"}, unset).out, "");  // nproc reads the variable, too
  REQUIRE(shares.size() == 1);
  CHECK(shares[0] == cores.at(0));

  ProcessOptions set;
  set.environment = {"OMP_NUM_THREADS=5"};
  CHECK(run(ddprun_sh({"-n", "1"}, "echo $OMP_NUM_THREADS"), set).out == "[0] 5\n");
  CHECK(
      run(ddprun_sh({"-n", "1", "--omp-threads", "3"}, "echo $OMP_NUM_THREADS"), set).out ==
      "[0] 3\n");
}

TEST_CASE("rank 0 reads standard input, the others have an empty one", "[process]") {
  ProcessOptions options;
  options.input = "typed\n";
  const Ended job =
      run(ddprun_sh(
              {"-n", "3"},
              "[ $RANK = 0 ] || exec readlink /proc/self/fd/0; read -r line; echo got $line"),
          options);
  CHECK(sorted_lines(job.out) == Lines{"[0] got typed", "[1] /dev/null", "[2] /dev/null"});
}

TEST_CASE("a rank starts with clean signals and no descriptors of ddprun's", "[process]") {
  const std::string script = "grep -E '^Sig(Blk|Ign)' /proc/self/status; ls -1 /proc/$$/fd";
  const auto without_ddprun = run({"sh", "-c", script});
  CHECK_THAT(without_ddprun.out, ContainsText("SigBlk:\t0000000000000000"));
  CHECK_THAT(without_ddprun.out, ContainsText("SigIgn:\t0000000000000000"));
  CHECK(run(ddprun_sh({"-n", "1", "--no-prefix"}, script)).out == without_ddprun.out);
  // Checks the last of several ranks, which could inherit the most.
  Lines of_last =
      sorted_lines(run(ddprun_sh({"-n", "3"}, "[ $RANK != 2 ] || { " + script + "; }")).out);
  for (auto& line : of_last) line.erase(0, std::string("[2] ").size());
  CHECK(of_last == sorted_lines(without_ddprun.out));
}

TEST_CASE("a rank leads its own session and process group", "[process]") {
  const Ended job = run(ddprun_sh(
      {"-n", "2"},
      "read -r pid name state parent group session rest < /proc/self/stat; "
      "echo $((group == pid)) $((session == pid))"));
  CHECK(sorted_lines(job.out) == Lines{"[0] 1 1", "[1] 1 1"});
}

TEST_CASE("arguments reach the program as they were given", "[process]") {
  const Ended job = run(ddprun({"-n", "1", "printf", "<%s>", "-n", "", "a b", "--", "--help"}));
  CHECK(job.out == "[0] <-n><><a b><--><--help>\n");
}

TEST_CASE("jobs at the same time have different ports, one within a job", "[process]") {
  const auto command = ddprun_sh({"-n", "2"}, "echo port $MASTER_PORT; exec sleep 1000");
  Process first(command);
  Process second(command);
  first.read_until("port ", 2);
  second.read_until("port ", 2);
  const auto a = numbers_after(first.out(), "port ");
  const auto b = numbers_after(second.out(), "port ");
  CHECK(a[0] == a[1]);
  CHECK(b[0] == b[1]);
  CHECK(a[0] != b[0]);
}

TEST_CASE("ddprun listens on no port, but for members of an elastic job", "[process]") {
  const bool elastic = GENERATE(false, true);
  // Finds the listening sockets (state 0A) of the process that runs the ranks.
  const std::string script =
      "for fd in /proc/$PPID/fd/*; do name=$(readlink $fd); inode=${name#socket:[}; "
      "[ \"$inode\" = \"$name\" ] || awk -v inode=${inode%]} "
      "'$4 == \"0A\" && $10 == inode { print \"listens\" }' /proc/net/tcp /proc/net/tcp6; done; "
      "echo looked";
  Lines options = {"-n", "1"};
  if (elastic) options.push_back("--elastic");
  const Ended job = run(ddprun_sh(options, script));
  CHECK(job.code == 0);
  CHECK(job.out == (elastic ? "[0] listens\n[0] looked\n" : "[0] looked\n"));
}

TEST_CASE("a program that cannot be executed is reported once", "[process]") {
  Ended job = run(ddprun({"-n", "4", "no-such-program-here"}));
  CHECK(job.code == 127);
  CHECK(job.out.empty());
  CHECK(job.err == "ddprun: cannot execute 'no-such-program-here': No such file or directory\n");

  job = run(ddprun({"-n", "4", "/etc/passwd"}));
  CHECK(job.code == 126);
  CHECK(job.err == "ddprun: cannot execute '/etc/passwd': Permission denied\n");
}

TEST_CASE("the error of a script names its interpreter where that is missing", "[process]") {
  const TemporaryFolder folder;
  const auto write = [&](const char* first_line) {
    const auto path = folder.write("script", std::string(first_line) + "echo started\n");
    ::chmod(path.c_str(), 0755);
    return path;
  };
  auto path = write("#!/bin/sh\r\n");
  auto job = run(ddprun({"-n", "2", path}));
  CHECK(job.code == 127);
  CHECK_THAT(
      job.err, ContainsText(
                   "cannot execute '" + path +
                   "': No such file or directory. It is there, "
                   "and its first line asks for an interpreter that is not: '#!/bin/sh', "
                   "which ends with a carriage return"));
  path = write("#!/no/such/interpreter\n");
  job = run(ddprun({"-n", "2", path}));
  CHECK_THAT(job.err, ContainsText("that is not: '#!/no/such/interpreter'\n"));
}

TEST_CASE("a bad command line starts nothing", "[process]") {
  const Ended job = run(ddprun({"-n", "0", "echo", "started"}));
  CHECK(job.code == 2);
  CHECK(job.out.empty());
  CHECK_THAT(job.err, ContainsText("whole number from 1 to 1024, got '0'"));
}
