// CIFAR-10's example as a user starts it.
#include <regex>
#include <string>
#include <vector>

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

// A data set that is trained on in a moment.
std::string draw_into(const TemporaryFolder& folder) {
  const auto data = folder.file("shapes");
  const auto drawn = ddp::testing::run({DRAW_SHAPES_PROGRAM, data, "320", "40"});
  CAPTURE(drawn.err);
  REQUIRE(drawn.code == 0);
  return data;
}

// In percent, of the last line.
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
  const auto job = cifar10_on_two_ranks({"--epochs", "6"});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK_THAT(job.output, ContainsText("training small on 5000 images, testing on 1000; 2 ranks"));
  CHECK_THAT(job.output, ContainsText("parameters: bitwise equal on 2 ranks"));
  CHECK(accuracy(job.ranks[0]) > 55);  // 74.5 where it was measured; guessing gives 10
}

TEST_CASE("cifar10 saves, resumes and traces", "[examples][process]") {
  const TemporaryFolder folder;
  const auto data = draw_into(folder);
  const auto state = folder.file("state.pt");
  const auto train = [&](Lines more) {
    Lines arguments{"--data", data, "--save", state};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto job = cifar10_on_two_ranks(arguments);
    INFO(job.output);
    CHECK(job.code == 0);
    return job;
  };
  const auto first =
      train({"--epochs", "2", "--bucket-cap-mb", "0.1", "--trace", folder.file("trace.json")});
  CHECK_THAT(first.output, ContainsText("trace: " + folder.file("trace.json")));
  const auto resumed = train({"--epochs", "3", "--resume", state});
  CHECK_THAT(resumed.output, ContainsText("resumed: " + state + ", 2 epochs done"));
  CHECK_THAT(resumed.output, ContainsText("epoch 3/3") && !ContainsText("epoch 2/3"));
  // Nothing is left to train: what was saved is what is tested.
  const auto tested = train({"--epochs", "3", "--resume", state});
  CHECK(accuracy(tested.ranks[0]) == accuracy(resumed.ranks[0]));
}

TEST_CASE("bad input to cifar10 is told before it trains", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto refuses = [&](const Lines& arguments, int code, const std::string& text) {
    const auto job = cifar10_on_two_ranks(arguments);
    INFO(job.output);
    CHECK(job.code == code);
    CHECK_THAT(job.output, ContainsText("cifar10: ") && ContainsText(text));
    CHECK_THAT(job.output, !ContainsText("epoch ") && !ContainsText("frame #"));
  };
  refuses({"--data", folder.path()}, 1, folder.file("data_batch_1.bin") + ": expected");
  refuses({"--model", "large"}, 2, "--model: ");
  refuses({"--lr", "nan"}, 2, "--lr: ");
  refuses({"--save", folder.file("missing/state.pt")}, 1, "expected a folder to write to");
  refuses(
      {"--resume", folder.write("torn.pt", "PK")}, 1, "torn.pt: expected a file that --save wrote");
}
