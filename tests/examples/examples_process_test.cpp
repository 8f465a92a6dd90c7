// Runs the example programs as a user starts them.
#include <signal.h>

#include <algorithm>
#include <regex>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "examples/common/data/idx.h"
#include "examples/mnist/training.h"
#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::TemporaryFolder;
using Lines = std::vector<std::string>;

const auto kTwoMinutes = ddp::testing::within(std::chrono::minutes(2));

JobEnded mnist_on_two_ranks(Lines arguments) {
  arguments.insert(arguments.begin(), MNIST_PROGRAM);
  return ddp::testing::run_job(2, arguments, kTwoMinutes);
}

int count(const Lines& lines, const std::string& text) {
  return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](const auto& line) {
    return line.find(text) != std::string::npos;
  }));
}

// Returns the last line's 355 of 360, and checks the line's exact format.
int correct_of_360(const Lines& lines) {
  REQUIRE_FALSE(lines.empty());
  std::smatch match;
  const std::regex pattern(R"(test accuracy: (\d+\.\d\d)% \((\d+)/360\))");
  CAPTURE(lines);
  REQUIRE(std::regex_match(lines.back(), match, pattern));
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
  const auto job = mnist_on_two_ranks({"--save", file});
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK(job.ddprun.empty());
  const auto& lines = job.ranks[0];
  CHECK(count(lines, "epoch ") == 6);
  CHECK(count(lines, "parameters: bitwise equal on 2 ranks") == 1);
  CHECK(count(lines, "saved: " + file) == 1);
  CHECK(count(lines, "steps: step ") == 1);
  CHECK(job.output.find('\r') == std::string::npos);
  const int correct = correct_of_360(lines);
  CHECK(correct >= 350);
  // The last evaluation on two ranks agrees with this one, so the file holds the trained weights.
  CHECK(correct_by_file(file) == correct);
}

TEST_CASE(
    "on a terminal mnist shows a bar; it tunes bucket sizes, and writes a trace",
    "[examples][process]") {
  const TemporaryFolder folder;
  const auto file = folder.file("trace.json");
  // Without prefixes, the lines are for the terminal alone.
  auto command = ddp::testing::ddprun(
      {"-n", "2", "--no-prefix", MNIST_PROGRAM, "--epochs", "1", "--tune-bucket-cap", "--trace",
       file});
  for (auto& word : command) word = "'" + word + "'";
  std::string line;
  for (const auto& word : command) line += word + " ";
  // script runs it on a terminal of its own, and copies the terminal's output.
  const auto ended =
      ddp::testing::run({"script", "-q", "-e", "-c", line, "/dev/null"}, kTwoMinutes);
  INFO(ended.out);
  CHECK(ended.code == 0);
  CHECK_THAT(ended.out, ContainsText("\r\033[Kepoch 1/1 [##############################] 23/23"));
  CHECK_THAT(ended.out, ContainsText("\r\033[Ktest accuracy: "));
  CHECK_THAT(ended.out, ContainsText("; bucket_cap_mb tuned to "));
  CHECK(count(ddp::testing::lines_of(ended.out), "trace: " + file) == 1);
  // Python checks that the trace is JSON.
  const auto names = ddp::testing::run(
      {"python3", "-c",
       "import json, sys; events = json.load(open(sys.argv[1]))['traceEvents'];"
       "print(sorted({(e['pid'], e['name'].rstrip(' 0123456789')) for e in events}))",
       file});
  INFO(names.err);
  for (const auto* rank : {"0", "1"}) {
    for (const auto* name : {"forward", "backward", "bucket", "wait for buckets"}) {
      CHECK_THAT(names.out, ContainsText(std::string("(") + rank + ", '" + name + "')"));
    }
  }
}

TEST_CASE("without a launcher mnist trains on one process", "[examples][process]") {
  const auto ended =
      ddp::testing::run({MNIST_PROGRAM, "--epochs", "1", "--threads", "2"}, kTwoMinutes);
  INFO(ended.out);
  CHECK(ended.code == 0);
  CHECK(ended.err.empty());
  const auto lines = ddp::testing::lines_of(ended.out);
  CHECK(count(lines, "parameters: bitwise equal on 1 rank") == 1);
  CHECK(correct_of_360(lines) > 180);
}

TEST_CASE("a wrong command line is reported", "[examples][process][errors]") {
  const auto alone = ddp::testing::run({MNIST_PROGRAM, "--epochs", "0"});
  CHECK(alone.code == 2);
  CHECK(alone.out.empty());
  CHECK(ddp::testing::lines_of(alone.err).size() == 1);
  CHECK_THAT(alone.err, ContainsText("mnist: --epochs:"));

  // At least one rank reports it: the first one to fail ends the job.
  const auto job = mnist_on_two_ranks({"--no-such-option"});
  INFO(job.output);
  CHECK(job.code == 2);
  CHECK_THAT(job.output, ContainsText("mnist: ") && ContainsText("--no-such-option"));
}

TEST_CASE("an error of all ranks at the start is reported", "[examples][process][errors]") {
  const auto backend = mnist_on_two_ranks({"--backend", "carrier-pigeon"});
  INFO(backend.output);
  CHECK(backend.code == 2);
  CHECK_THAT(backend.output, ContainsText("mnist: backend(): expected") && ContainsText("pigeon"));

  const auto environment =
      ddp::testing::run_job(2, {"sh", "-c", "WORLD_SIZE=x exec \"$0\"", MNIST_PROGRAM});
  INFO(environment.output);
  CHECK(environment.code == 2);
  CHECK_THAT(environment.output, ContainsText("mnist: WORLD_SIZE: expected a whole number"));
}

TEST_CASE("wrong data is reported once, without a backtrace", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto job = mnist_on_two_ranks({"--data", folder.path()});
  INFO(job.output);
  CHECK(job.code == 1);
  REQUIRE(job.ranks[0].size() == 1);
  CHECK_THAT(
      job.ranks[0][0], ContainsText(
                           "mnist: " + folder.file("train-images-idx3-ubyte") +
                           ": expected an IDX file, found none"));
  CHECK(job.ranks[1].empty());
  // Rank 1 did not end by itself, which could have ended rank 0 before its message.
  REQUIRE(job.ddprun.size() == 1);
  CHECK_THAT(job.ddprun[0], ContainsText("ddprun: rank 0 "));
}

TEST_CASE(
    "a file that cannot be saved is reported before training", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto job = mnist_on_two_ranks({"--save", folder.file("missing/net.pt")});
  INFO(job.output);
  CHECK(job.code == 1);
  CHECK(count(job.ranks[0], "expected a folder to write to") == 1);
  CHECK(count(job.ranks[0], "epoch ") == 0);
  CHECK(job.ranks[1].empty());
}

TEST_CASE(
    "minimal runs without a launcher, and mentions it only on request", "[examples][process]") {
  auto options = kTwoMinutes;
  options.environment = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",       "LOCAL_WORLD_SIZE",
                         "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS=1"};
  const auto quiet = ddp::testing::run({MINIMAL_PROGRAM}, options);
  CHECK(quiet.code == 0);
  CHECK(quiet.err.empty());
  CHECK_THAT(quiet.out, ContainsText("y = "));
  options.environment.push_back("TORCH_CPP_LOG_LEVEL=INFO");
  CHECK_THAT(
      ddp::testing::run({MINIMAL_PROGRAM}, options).err, ContainsText("it is a world of one rank"));
  options.environment.push_back("MASTER_ADDR=127.0.0.1");
  const auto half = ddp::testing::run({MINIMAL_PROGRAM}, options);
  CHECK(half.code != 0);
  CHECK_THAT(half.err, ContainsText("expected WORLD_SIZE in the environment"));
}

TEST_CASE("minimal finds its line on two ranks", "[examples][process]") {
  const auto job = ddp::testing::run_job(2, {MINIMAL_PROGRAM}, kTwoMinutes);
  INFO(job.output);
  CHECK(job.code == 0);
  std::smatch match;
  REQUIRE(
      std::regex_search(job.output, match, std::regex(R"(y = ([-0-9.e]+) x \+ ([-0-9.e]+)\n)")));
  CHECK(std::stod(match[1]) == Approx(3).margin(0.02));
  CHECK(std::stod(match[2]) == Approx(-1).margin(0.02));
  const auto lines = ddp::testing::lines_of(job.output);
  CHECK(count(lines, "step ") == 1);
  CHECK(count(lines, "arning") == 0);
  CHECK(count(lines, "backend(") == 0);
}

TEST_CASE("the log names the chosen backend once a job", "[examples][process]") {
  auto options = kTwoMinutes;
  options.environment = {"TORCH_CPP_LOG_LEVEL=INFO"};
  const auto job = ddp::testing::run_job(2, {MINIMAL_PROGRAM}, options);
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(
      count(
          ddp::testing::lines_of(job.output),
          R"(default_pg: backend("") chose "shm" for CPU tensors.)") == 1);
}

TEST_CASE("a killed mnist resumes and ends the same", "[examples][process]") {
  const TemporaryFolder whole, killed;
  const auto arguments = [](const TemporaryFolder& folder) {
    return Lines{"--epochs", "1", "--checkpoint", folder.path(), "--checkpoint-every", "5"};
  };
  // Removes the duration from the line.
  const auto epoch_line = [](const Lines& lines) {
    for (const auto& line : lines) {
      if (line.find("epoch 1/1") == 0) return line.substr(0, line.rfind(','));
    }
    return std::string();
  };
  auto resumable = arguments(whole);  // as a job that is started again has it from the first time
  resumable.push_back("--resume");
  const auto expected = mnist_on_two_ranks(resumable).ranks.front();
  CHECK(count(expected, "resumed after") == 0);
  CHECK(count(expected, "starts from the beginning") == 1);
  REQUIRE(!epoch_line(expected).empty());
  {
    auto command = arguments(killed);
    command.insert(command.begin(), {"-n", "2", MNIST_PROGRAM});
    ddp::testing::Process job(ddp::testing::ddprun(command), kTwoMinutes);
    REQUIRE(ddp::testing::eventually([&] {
      const auto names = ddp::testing::names_in(killed.path());
      return std::any_of(names.begin(), names.end(), [](const std::string& name) {
        return name >= "step-00000010";
      });
    }));
    job.send(SIGKILL);
  }
  auto resume = arguments(killed);
  resume.push_back("--resume");
  const auto resumed = mnist_on_two_ranks(resume).ranks.front();
  CHECK(count(resumed, "resumed after step ") == 1);
  CHECK(count(resumed, "resumed after step 0") == 0);
  CHECK(epoch_line(resumed) == epoch_line(expected));
  CHECK(resumed.back() == expected.back());
}
