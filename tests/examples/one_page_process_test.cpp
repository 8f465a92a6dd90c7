// Runs the examples of one page each as a user starts them.
#include <signal.h>

#include <regex>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::numbers_after;
using ddp::testing::TemporaryFolder;
using Lines = std::vector<std::string>;

const auto kPagePatience = ddp::testing::within(std::chrono::minutes(2));

std::string program(const std::string& name) { return EXAMPLES_FOLDER + ("/" + name); }

JobEnded run_on(int ranks, const std::string& name, Lines arguments) {
  arguments.insert(arguments.begin(), program(name));
  return ddp::testing::run_job(ranks, arguments, kPagePatience);
}

/// Returns the last accuracy in the text, in percent.
double accuracy(const std::string& text) {
  const auto at = text.rfind("test accuracy ");
  return at == std::string::npos ? 0 : std::stod(text.substr(at + 14));
}

}  // namespace

TEST_CASE("a sharded optimizer trains, and continues on more ranks", "[examples][process]") {
  const std::string stage = GENERATE("1", "2");
  const TemporaryFolder whole, parts;
  const auto epochs = [&](int ranks, const TemporaryFolder& folder, const std::string& count) {
    const auto job = run_on(
        ranks, "zero",
        {"--stage", stage, "--epochs", count, "--hidden", "64", "--checkpoint", folder.path()});
    INFO(job.output);
    REQUIRE(job.code == 0);
    return job;
  };
  epochs(2, parts, "1");
  if (stage == "1") {
    const auto expected = epochs(2, whole, "2").ranks[0];
    const auto resumed = epochs(2, parts, "2").ranks[0];
    CHECK(resumed[0].find("epoch 2/2") == 0);
    CHECK(resumed[0] == expected[1]);
    return;
  }
  const auto more = epochs(3, parts, "3");
  CHECK(more.ranks[0][0].find("epoch 2/3") == 0);
  CHECK(accuracy(more.output) > 90);
  const auto bytes = numbers_after(more.output, "bytes; AdamW's state: ");
  const auto own = numbers_after(more.output, "of which rank 0 has ");
  CHECK(own.at(0) < bytes.at(0) / 3 + 64);
}

TEST_CASE("an example starts its ranks itself", "[examples][process]") {
  const auto ended = ddp::testing::run({program("spawn")}, kPagePatience);
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  const auto lines = ddp::testing::sorted_lines(ended.out);
  REQUIRE(lines.size() == 2);
  const std::string text = "of 2: loss ";
  CHECK(lines[0].find("[0] rank 0 " + text) == 0);
  CHECK(lines[1].find("[1] rank 1 " + text) == 0);
  const auto loss = lines[0].substr(lines[0].find(text));
  CHECK(lines[1].substr(lines[1].find(text)) == loss);  // of equal nets
  CHECK(std::stod(loss.substr(text.size())) < 0.01);
}

TEST_CASE("all hooks of the example train", "[examples][process]") {
  const std::string hook = GENERATE(
      "all_reduce", "fp16", "bf16", "int8", "fp8", "power_sgd", "power_sgd_bf16", "top_k",
      "majority");
  const auto job = run_on(2, "comm_hook", {"--hook", hook, "--epochs", "3"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(accuracy(job.output) > 88);
}

TEST_CASE("ranks that mostly step alone still learn", "[examples][process]") {
  const auto job = run_on(2, "local_sgd", {"--epochs", "5"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(accuracy(job.output) > 90);
  CHECK_THAT(job.output, ContainsText("115 steps, of which 20 averaged gradients and 12"));
}

TEST_CASE("ranks with uneven inputs train on all of them", "[examples][process]") {
  const auto job = run_on(3, "uneven_inputs", {"--epochs", "4"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK_THAT(job.output, ContainsText("batches by rank: 8, 15, 23"));
  CHECK_THAT(job.output, ContainsText("parameters: equal on all ranks"));
  CHECK_THAT(job.output, !ContainsText("Warning"));
  CHECK(accuracy(job.output) > 80);
}

TEST_CASE("gradients averaged by hand and by the wrapper are equal", "[examples][process]") {
  const auto job = run_on(2, "manual_allreduce", {"--steps", "40"});
  INFO(job.output);
  CHECK(job.code == 0);  // the program compares
  CHECK_THAT(job.output, ContainsText("wrapped: "));
}

TEST_CASE("a ring by hand has the sums of the library", "[examples][process]") {
  // The last: fewer elements than ranks. The second: not divisible by ranks.
  const auto [ranks, elements] =
      GENERATE(table<int, std::string>({{1, "1001"}, {2, "1001"}, {3, "2"}}));
  const auto job = run_on(ranks, "ring_allreduce", {"--elements", elements, "--rounds", "2"});
  INFO(job.output);
  CHECK(job.code == 0);  // the program compares
  CHECK_THAT(job.output, ContainsText("ring by hand: "));
}

TEST_CASE("workers around a parameter server stay within the bound", "[examples][process]") {
  // The order of the gradients is the machine's: after 60 steps it decides over some percent.
  const auto ended = ddp::testing::run(
      {program("parameter_server"), "--workers", "3", "--steps", "150", "--ahead", "1"},
      kPagePatience);
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsText("450 gradients applied"));
  CHECK(numbers_after(ended.out, "at most ").at(0) <= 2 * 3);
  CHECK(accuracy(ended.out) > 90);
}

TEST_CASE("ranks of a launcher are a parameter server and its workers", "[examples][process]") {
  const auto job = run_on(3, "parameter_server", {"--steps", "150"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK_THAT(job.output, ContainsText("300 gradients applied"));
  CHECK(accuracy(job.output) > 85);
  const auto alone = run_on(1, "parameter_server", {"--steps", "60"});
  CHECK(alone.code == 2);
  CHECK_THAT(alone.output, ContainsText("expected 2 ranks or more under a launcher"));
  const auto again = run_on(2, "parameter_server", {"--workers", "1"});
  CHECK(again.code == 2);
  CHECK_THAT(again.output, ContainsText("--workers: expected none under a launcher"));
}

TEST_CASE("a worker that is killed does not stop the others", "[examples][process]") {
  ddp::testing::Process server(
      {program("parameter_server"), "--workers", "3", "--steps", "2000"}, kPagePatience);
  server.read_until("worker 1 has come\n");
  const auto pids = numbers_after(server.out(), " is process ");
  REQUIRE(pids.size() == 3);
  CHECK(kill(pids[1], SIGKILL) == 0);
  const auto ended = server.wait();
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsText("worker 1 is lost: "));
  CHECK_THAT(ended.out, ContainsText("worker 0 has done its steps"));
  CHECK_THAT(ended.out, ContainsText("worker 2 has done its steps"));
  CHECK(ended.out.find("worker 1 has done") == std::string::npos);
  CHECK(accuracy(ended.out) > 90);
}

TEST_CASE("the small examples report bad options", "[examples][process][errors]") {
  for (const std::string name :
       {"comm_hook", "local_sgd", "manual_allreduce", "ring_allreduce", "uneven_inputs", "zero",
        "parameter_server"}) {
    CAPTURE(name);
    const auto wrong = ddp::testing::run({program(name), "--backendd"}, kPagePatience);
    CHECK(wrong.code == 2);
    CHECK_THAT(wrong.err, ContainsText(name + ": "));
    CHECK(ddp::testing::lines_of(wrong.err).size() == 1);
  }
  const auto help = ddp::testing::run({program("comm_hook"), "--help"}, kPagePatience);
  CHECK(help.code == 0);
  CHECK_THAT(help.out, ContainsText("--help"));
  // The second starts ranks of its own.
  for (const std::string name : {"zero", "parameter_server"}) {
    CAPTURE(name);
    const auto data = ddp::testing::run({program(name), "--data", "/nowhere"}, kPagePatience);
    CHECK(data.code == 1);
    CHECK_THAT(data.err, ContainsText("/nowhere"));
  }
}
