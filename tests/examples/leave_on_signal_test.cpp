// Examples that are told to leave save in that step, end with one code, and go on there.
#include <signal.h>

#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using Lines = std::vector<std::string>;

// A rank that says its pid, and its exit code after its end: signals to ddprun and to ranks that
// end together reach the shell, too.
const Lines kRank{
    "sh", "-c",
    "trap : TERM USR1; \"$@\" & pid=$!; echo \"pid $pid\"; wait $pid; code=$?; "
    "while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done; echo \"code $code\"; exit $code",
    "sh"};

struct Example {
  Lines command;      // trains for longer than this test waits
  std::string begun;  // a line of rank 0 before its first step
  int signal;         // to ddprun
};

std::string text_after(const std::string& text, const std::string& label, char end) {
  const auto begin = text.find(label);
  if (begin == std::string::npos) return "";
  const auto from = begin + label.size();
  return text.substr(from, text.find(end, from) - from);
}

Lines joined(Lines front, const Lines& back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

Example example_of(const std::string& name, const TemporaryFolder& folder) {
  const Lines leaving{"--checkpoint", folder.file("checkpoints"), "--leave-on-signal"};
  if (name == "mnist") {
    return {joined({MNIST_PROGRAM, "--epochs", "100000"}, leaving), "training on", SIGUSR1};
  }
  if (name == "cifar10") {
    const auto data = folder.file("shapes");
    REQUIRE(run({DRAW_SHAPES_PROGRAM, data, "320", "40"}).code == 0);
    const Lines command{CIFAR10_PROGRAM, "--data", data, "--epochs", "100000"};
    return {joined(command, leaving), "training small", SIGTERM};
  }
  const Lines command{TRANSFORMER_PROGRAM, "--context", "16",       "--width", "32",
                      "--heads",           "2",         "--layers", "2",       "--steps",
                      "1000000",           "--sample",  "0"};
  return {joined(command, leaving), "training ", SIGUSR1};
}

}  // namespace

TEST_CASE("ranks leave in the step of a signal, and go on there", "[examples][process]") {
  const std::string name = GENERATE("mnist", "cifar10", "transformer");
  CAPTURE(name);
  const TemporaryFolder folder;
  const auto example = example_of(name, folder);
  const Lines ranks{"-n", "2", "--grace", "1000"};
  auto options = within(std::chrono::minutes(2));
  options.join_streams = true;

  // The signal is for one of them.
  std::string place;
  {
    Process job(ddprun(joined(ranks, joined(kRank, example.command))), options);
    job.read_until("pid ", 2);
    job.read_until(example.begun);
    REQUIRE(::kill(numbers_after(job.out(), "[1] pid ").at(0), SIGUSR1) == 0);
    const auto ended = job.wait();
    INFO(ended.out);
    CHECK(ended.code == 143);
    CHECK_THAT(ended.out, ContainsText("[0] code 143") && ContainsText("[1] code 143"));
    place = text_after(ended.out, "[0] leaves after ", ',');
    REQUIRE(!place.empty());
  }

  // ddprun passes it on, and does not start ranks again that leave.
  CAPTURE(place);
  Process job(
      ddprun(joined(joined(ranks, {"--max-restarts", "3"}), joined(example.command, {"--resume"}))),
      options);
  job.read_until("after " + place + "\n");
  job.send(example.signal);
  const auto ended = job.wait();
  INFO(ended.out);
  CHECK(ended.code == 143);
  CHECK_THAT(ended.out, ContainsText("[0] resumed after "));
  CHECK_THAT(ended.out, ContainsText("[0] leaves after ") && !ContainsText("restart "));
  CHECK_THAT(ended.out, !ContainsText("killing"));
}

TEST_CASE("leaving on a signal needs a checkpoint", "[examples][process][errors]") {
  for (const char* program : {MNIST_PROGRAM, CIFAR10_PROGRAM, TRANSFORMER_PROGRAM}) {
    const auto ended = run({program, "--leave-on-signal"});
    CAPTURE(program, ended.err);
    CHECK(ended.code == 2);
    CHECK_THAT(ended.err, ContainsText("--leave-on-signal") && ContainsText("--checkpoint"));
  }
}
