// How ddprun passes on the ranks' output.
#include <csignal>
#include <map>
#include <sstream>
#include <string>

#include <unistd.h>

#include "launch/pipe.h"
#include "support/processes.h"

#include "support/catch.h"

using namespace ddp::testing;

// The sanitizers keep freed memory for a while.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

TEST_CASE("stdout and stderr stay separate, with prefixes", "[process]") {
  const Ended job = run(ddprun_sh({"-n", "1"}, "echo out; echo err >&2; printf 'no newline'"));
  CHECK(job.code == 0);
  CHECK(job.out == "[0] out\n[0] no newline\n");
  CHECK(job.err == "[0] err\n");
}

TEST_CASE("lines of ranks that write at the same time stay whole and in order", "[process]") {
  constexpr int kRanks = 4;
  constexpr int kLines = 2000;
  ProcessOptions options;
  options.join_streams = GENERATE(false, true);
  // Long enough that a line often spans two reads; half of the lines go to stderr.
  const Ended job =
      run(ddprun_sh(
              {"-n", std::to_string(kRanks)},
              "awk -v r=$RANK 'BEGIN { for (i = 0; i < 2000; ++i) { s = sprintf(\"%d %d \", r, i);"
              " while (length(s) < 40 + i % 300) s = s r; print s > (i % 2 ? \"/dev/stderr\" : "
              "\"/dev/stdout\") } }'"),
          options);
  CHECK(job.code == 0);
  std::map<std::pair<int, int>, int> next;  // by rank and stream
  int lines = 0;
  for (const std::string* text : {&job.out, &job.err}) {
    std::istringstream stream(*text);
    for (std::string line; std::getline(stream, line); ++lines) {
      int prefix = -1;
      int rank = -1;
      int i = -1;
      REQUIRE(std::sscanf(line.c_str(), "[%d] %d %d ", &prefix, &rank, &i) == 3);
      REQUIRE(prefix == rank);
      const auto digits_from = line.find(' ', line.find(' ', 4) + 1) + 1;
      REQUIRE(line.size() == 4 + static_cast<size_t>(40 + i % 300));
      REQUIRE(line.find_first_not_of(std::to_string(rank), digits_from) == std::string::npos);
      auto& expected = next.try_emplace({rank, i % 2}, i % 2).first->second;
      REQUIRE(i == expected);
      expected += 2;
    }
  }
  CHECK(lines == kRanks * kLines);
}

TEST_CASE("a line of 8 MB passes whole, from every rank", "[process]") {
  const Ended job = run(ddprun_sh({"-n", "2"}, "head -c 8000000 /dev/zero | tr '\\0' $RANK; echo"));
  CHECK(job.code == 0);
  const std::string zeros = "[0] " + std::string(8000000, '0') + "\n";
  const std::string ones = "[1] " + std::string(8000000, '1') + "\n";
  CHECK((job.out == zeros + ones || job.out == ones + zeros));
}

TEST_CASE("endless output without a newline neither blocks nor stays in memory", "[process]") {
  // Prints ddprun's own peak: it holds 16 MiB of a line, and again while writing it. On a busy
  // machine the processes wait for a core once for every 64 KiB.
  const Ended job =
      run(ddprun_sh({"-n", "1"}, "head -c 100000000 /dev/zero; grep VmHWM /proc/$PPID/status"),
          within(std::chrono::minutes(3)));
  CHECK(job.code == 0);
  CHECK(job.out.size() > 100000000);
  const auto peak_kb = numbers_after(job.out, "VmHWM:");
  CHECK(peak_kb.at(0) > 16000);
  if (!kSanitized) CHECK(peak_kb.at(0) < 70000);
}

TEST_CASE("every byte passes except escape sequences", "[process]") {
  const Ended job = run(ddprun_sh({"-n", "1"}, "printf 'a\\000\\377\\t\\004\\003b\\r\\n'"));
  CHECK(
      job.out == std::string(
                     "[0] a\0\xff\t\x04\x03"
                     "b\r\n",
                     13));
}

TEST_CASE(
    "a progress bar's frames are seen on a terminal while the line is unfinished", "[process]") {
  if (!ddp::launch::make_pseudo_terminal()) return;
  ProcessOptions options;
  options.terminal_columns = 80;
  Process job(ddprun_sh({"-n", "1"}, "printf '\\r10%%\\r20%%\\r30%%'; exec sleep 1000"), options);
  job.read_until("20%\r");
  CHECK(job.out() == "[0] \r[0] 10%\r[0] 20%\r");
}

TEST_CASE("--no-prefix gives the ranks ddprun's own output", "[process]") {
  const Ended job =
      run(ddprun_sh({"-n", "2", "--no-prefix"}, "echo out; readlink /proc/self/fd/1 >&2"));
  CHECK(job.code == 0);
  CHECK(job.out == "out\nout\n");
  const auto pipes = sorted_lines(job.err);
  REQUIRE(pipes.size() == 2);
  CHECK(pipes[0] == pipes[1]);
}

TEST_CASE("the job ends when its output has no reader any more", "[process]") {
  Process job(ddprun_sh({"-n", "2"}, "echo pid $$; while :; do echo more; done"));
  job.read_until("pid ", 2);
  const auto pids = numbers_after(job.out(), "pid ");
  job.stop_reading();
  const Ended ended = job.wait();
  CHECK(ended.code == 128 + SIGPIPE);
  CHECK_THAT(
      ended.err,
      ContainsText("ddprun: cannot write the ranks' output: Broken pipe; ending 2 ranks"));
  for (const int pid : pids) CHECK(is_gone(pid));
}

TEST_CASE("a reader that stalls does not keep a failed job alive", "[process]") {
  // Rank 0 fills all buffers up to this test, which stops reading; rank 1 fails on a signal.
  Process job(ddprun_sh(
      {"-n", "2"}, "[ $RANK = 1 ] && exec " SIGNAL_PROBE " 1 7; echo flood pid $$; exec yes"));
  job.read_until("parent ");
  job.read_until("flood ");
  const auto pids = numbers_after(job.out(), "flood pid ");
  const auto failing = numbers_after(job.out().substr(job.out().find("parent ")), "pid ");
  CHECK(::kill(failing.at(0), SIGUSR1) == 0);
  CHECK(eventually([&] { return is_gone(pids.at(0)); }));
  const Ended ended = job.wait();
  CHECK(ended.code == 7);
  CHECK_THAT(ended.err, ContainsText("exited with code 7"));
}
