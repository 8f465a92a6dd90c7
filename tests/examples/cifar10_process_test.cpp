// Runs CIFAR-10's example as a user starts it.
#include <regex>
#include <string>
#include <vector>

#include <ddp/state_dict.h>

#include "examples/cifar10/net.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::TemporaryFolder;
using Lines = std::vector<std::string>;

JobEnded cifar10_on_two_ranks(Lines arguments) {
  arguments.insert(arguments.begin(), CIFAR10_PROGRAM);
  return ddp::testing::run_job(2, arguments, ddp::testing::within(std::chrono::minutes(3)));
}

// Draws a data set that trains in a moment.
std::string draw_into(const TemporaryFolder& folder) {
  const auto data = folder.file("shapes");
  const auto drawn = ddp::testing::run({DRAW_SHAPES_PROGRAM, data, "320", "40"});
  CAPTURE(drawn.err);
  REQUIRE(drawn.code == 0);
  return data;
}

// Returns the percentage in the last line.
double accuracy(const Lines& lines) {
  REQUIRE_FALSE(lines.empty());
  CAPTURE(lines);
  std::smatch match;
  const std::regex pattern(R"(test accuracy: (\d+\.\d\d)% \(\d+/\d+\))");
  REQUIRE(std::regex_match(lines.back(), match, pattern));
  return std::stod(match[1]);
}

}  // namespace

TEST_CASE("cifar10 learns shapes on two ranks", "[examples][process]") {
  const auto job = cifar10_on_two_ranks({"--epochs", "1"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK_THAT(job.output, ContainsText("training small on 5000 images, testing on 1000; 2 ranks"));
  CHECK_THAT(job.output, ContainsText("parameters: bitwise equal on 2 ranks"));
  CHECK(accuracy(job.ranks[0]) > 20);  // 30.5 when it was measured; guessing gives 10
}

TEST_CASE("cifar10 keeps checkpoints, resumes, saves and traces", "[examples][process]") {
  const TemporaryFolder folder, checkpoints, killed;
  const auto data = draw_into(folder);
  const auto weights = folder.file("weights.pt");
  const Lines same_run = GENERATE(Lines{}, Lines{"--amp", "--sync-batch-norm", "--ema", "0.9"});
  const auto train = [&](Lines more) {
    Lines arguments{"--data", data, "--epochs", "3"};
    arguments.insert(arguments.end(), same_run.begin(), same_run.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return cifar10_on_two_ranks(arguments);
  };
  const auto whole = train(
      {"--checkpoint", checkpoints.path(), "--bucket-cap-mb", "0.1", "--trace",
       folder.file("trace.json"), "--save", weights});
  INFO(whole.output);
  REQUIRE(whole.code == 0);
  CHECK_THAT(whole.output, ContainsText("trace: " + folder.file("trace.json")));
  CHECK_THAT(whole.output, ContainsText("saved: " + weights));
  cifar10::Net net(cifar10::net_options("small"));
  ddp::load_state_dict(*net, weights);  // has the same names with SyncBatchNorm

  // Makes the folder look as if the run had been killed in its third epoch.
  const auto rank0 = whole.ranks[0];
  ddp::testing::run({"cp", "-r", checkpoints.file("step-00000002"), killed.path()});
  const auto resumed = train({"--checkpoint", killed.path(), "--resume"});
  INFO(resumed.output);
  CHECK_THAT(resumed.output, ContainsText("resumed after epoch 2"));
  CHECK_THAT(resumed.output, ContainsText("epoch 3/3") && !ContainsText("epoch 2/3"));
  CHECK(resumed.ranks[0].back() == rank0.back());
  if (!same_run.empty()) return;
  // Nothing is left to train, so the saved weights are tested.
  const auto tested = train({"--checkpoint", killed.path(), "--resume"});
  CHECK(accuracy(tested.ranks[0]) == accuracy(resumed.ranks[0]));
  const auto again = train({"--checkpoint", killed.path()});
  CHECK(again.code == 1);
  CHECK_THAT(again.output, ContainsText("expected a folder without checkpoints"));
}

TEST_CASE("cifar10 reports bad input before it trains", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& output, const std::string& text) {
    INFO(output);
    CHECK_THAT(output, ContainsText("cifar10: ") && ContainsText(text));
    CHECK_THAT(output, !ContainsText("epoch ") && !ContainsText("frame #"));
  };
  const auto job = cifar10_on_two_ranks({"--data", folder.path()});
  CHECK(job.code == 1);
  check(job.output, folder.file("data_batch_1.bin") + ": expected");
  const auto refuses = [&](Lines arguments, int code, const std::string& text) {
    arguments.insert(arguments.begin(), CIFAR10_PROGRAM);
    const auto ended = ddp::testing::run(arguments);
    CHECK(ended.code == code);
    check(ended.out + ended.err, text);
  };
  refuses({"--model", "large"}, 2, "--model: ");
  refuses({"--lr", "nan"}, 2, "--lr: ");
  refuses({"--save", folder.file("missing/state.pt")}, 1, "expected a folder to write to");
  refuses({"--resume"}, 2, "--checkpoint");
}
