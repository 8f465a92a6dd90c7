// The example programs as a user starts them.
#include <sys/wait.h>

#include <cstdio>
#include <regex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "examples/mnist/training.h"
#include "examples/temporary_folder.h"
#include "support/catch.h"

namespace {

using examples::testing::TemporaryFolder;

struct Outcome {
  int status = -1;
  std::string output;              // both streams
  std::vector<std::string> lines;  // of it
};

// The timeout ends a program that hangs before CTest would end the test.
Outcome run(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen(("timeout -k 5 120 " + command + " 2>&1").c_str(), "r");
  REQUIRE(pipe != nullptr);
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    if (outcome.output.empty() || outcome.output.back() == '\n') outcome.lines.emplace_back();
    outcome.output += static_cast<char>(c);
    if (c != '\n') outcome.lines.back() += static_cast<char>(c);
  }
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }
const std::string kTwoRanks = quoted(DDPRUN_PROGRAM) + " -n 2 ";
const std::string kMnist = quoted(MNIST_PROGRAM) + " ";

int count(const Outcome& outcome, const std::string& text) {
  int found = 0;
  for (const auto& line : outcome.lines) found += line.find(text) != std::string::npos ? 1 : 0;
  return found;
}

// The last line's 355 of 360, and that it reads exactly as promised behind ddprun's prefix.
int correct_of_360(const Outcome& outcome) {
  REQUIRE_FALSE(outcome.lines.empty());
  std::smatch match;
  const std::regex pattern(R"((?:\[0\] ?)?test accuracy: (\d+\.\d\d)% \((\d+)/360\))");
  INFO(outcome.output);
  REQUIRE(std::regex_match(outcome.lines.back(), match, pattern));
  const int correct = std::stoi(match[2]);
  CHECK(std::stod(match[1]) == Approx(100.0 * correct / 360).margin(0.00501));
  return correct;
}

int correct_by_file(const std::string& path) {
  mnist::Net net;
  torch::load(net, path);
  const auto train = examples::read_mnist(MNIST_DEFAULT_DATA, "train");
  examples::ImageDataset test(
      examples::read_mnist(MNIST_DEFAULT_DATA, "t10k"), examples::measure_pixels(train.images));
  return static_cast<int>(mnist::evaluate(net, test, 0, 1).correct);
}

}  // namespace

TEST_CASE("the defaults reach 97% on two ranks", "[examples][process]") {
  const TemporaryFolder folder;
  const auto file = folder.file("net.pt");
  const auto outcome = run(kTwoRanks + kMnist + "--save " + quoted(file));
  INFO(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(count(outcome, "epoch ") == 6);
  CHECK(count(outcome, "parameters: bitwise equal on 2 ranks") == 1);
  CHECK(count(outcome, "saved: " + file) == 1);
  CHECK(outcome.output.find('\r') == std::string::npos);
  const int correct = correct_of_360(outcome);
  CHECK(correct >= 350);
  // The last evaluation on two ranks and this one agree, so the file holds what was trained.
  CHECK(correct_by_file(file) == correct);
}

TEST_CASE("without a launcher mnist trains on one process", "[examples][process]") {
  const auto outcome = run(kMnist + "--epochs 1 --threads 2");
  INFO(outcome.output);
  CHECK(outcome.status == 0);
  CHECK(count(outcome, "parameters: bitwise equal on 1 rank") == 1);
  CHECK(correct_of_360(outcome) > 180);
}

TEST_CASE("a wrong command line is told once", "[examples][process][errors]") {
  const auto alone = run(kMnist + "--epochs 0");
  CHECK(alone.status == 2);
  CHECK(alone.lines.size() == 1);
  CHECK_THAT(alone.output, ContainsText("mnist: --epochs:"));

  const auto outcome = run(kTwoRanks + kMnist + "--no-such-option");
  INFO(outcome.output);
  CHECK(outcome.status != 0);
  CHECK(count(outcome, "mnist: ") == 1);
}

TEST_CASE("wrong data is told once, without a stack", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto outcome = run(kTwoRanks + kMnist + "--data " + quoted(folder.path()));
  INFO(outcome.output);
  CHECK(outcome.status != 0);
  CHECK(
      count(
          outcome, "mnist: " + folder.file("train-images-idx3-ubyte") +
                       ": expected an IDX file, found none") == 1);
  CHECK(count(outcome, "mnist: ") == 1);
  CHECK(count(outcome, "frame #") == 0);
}

TEST_CASE("a file that cannot be saved is told before training", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto outcome = run(kTwoRanks + kMnist + "--save " + quoted(folder.file("missing/net.pt")));
  INFO(outcome.output);
  CHECK(outcome.status != 0);
  CHECK(count(outcome, "expected a folder to write to") == 1);
  CHECK(count(outcome, "epoch ") == 0);
}

TEST_CASE("minimal finds its line on two ranks", "[examples][process]") {
  const auto outcome = run(kTwoRanks + quoted(MINIMAL_PROGRAM));
  INFO(outcome.output);
  CHECK(outcome.status == 0);
  std::smatch match;
  REQUIRE(std::regex_search(
      outcome.output, match, std::regex(R"(y = ([-0-9.e]+) x \+ ([-0-9.e]+)\n)")));
  CHECK(std::stod(match[1]) == Approx(3).margin(0.02));
  CHECK(std::stod(match[2]) == Approx(-1).margin(0.02));
}
