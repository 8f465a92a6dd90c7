// Runs the transformer's example as a user starts it.
#include <algorithm>
#include <cmath>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::TemporaryFolder;
using Lines = std::vector<std::string>;

JobEnded transformer_on(int ranks, Lines arguments, const Lines& more) {
  arguments.insert(arguments.begin(), TRANSFORMER_PROGRAM);
  arguments.insert(arguments.end(), more.begin(), more.end());
  return ddp::testing::run_job(ranks, arguments, ddp::testing::within(std::chrono::minutes(2)));
}

JobEnded transformer_on_two_ranks(const Lines& arguments, const Lines& more = {}) {
  return transformer_on(2, arguments, more);
}

// Options of a model that trains in a moment.
Lines tiny(int steps) {
  return {"--context", "16",       "--width", "32",      "--heads",
          "2",         "--layers", "2",       "--steps", std::to_string(steps),
          "--warmup",  "5",        "--lr",    "0.005",   "--report-every",
          "10",        "--sample", "40"};
}

/// Returns rank 0's lines with losses and the first line of its sample, without durations.
Lines printed_lines(const JobEnded& job) {
  Lines lines;
  for (const auto& line : job.ranks[0]) {
    if (line.find("step ") == 0) lines.push_back(line.substr(0, line.find(';')));
    if (line.find("sample: ") == 0) lines.push_back(line);
  }
  return lines;
}

std::vector<double> losses(const JobEnded& job, const std::string& name) {
  std::vector<double> found;
  const std::regex pattern(name + R"( ([\d.]+),)");
  for (const auto& line : job.ranks[0]) {
    std::smatch match;
    if (std::regex_search(line, match, pattern)) found.push_back(std::stod(match[1]));
  }
  return found;
}

}  // namespace

TEST_CASE("the transformer learns the pages of this library", "[examples][process]") {
  const auto job = transformer_on_two_ranks(tiny(150));
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK_THAT(job.output, ContainsText("parameters: bitwise equal on 2 ranks"));
  CHECK_THAT(job.output, ContainsText("step 150/150: loss ") && ContainsText(" characters/s"));
  const auto trained = losses(job, "loss"), held_out = losses(job, "held out");
  REQUIRE(trained.size() == 15);
  REQUIRE(held_out.size() == 15);
  CHECK(trained.front() < 4.7);  // 4.6: all 95 characters equally likely
  CHECK(trained.back() < 3.2);   // 3.4: only the frequencies of characters
  CHECK(held_out.back() < 3.1);
  CHECK_THAT(job.output, ContainsText("sample: #"));  // the text's first character
}

TEST_CASE("a resumed transformer ends in the same bits", "[examples][process]") {
  const Lines more = GENERATE(
      Lines{}, Lines{"--amp", "--accumulate", "2", "--checkpoint-activations", "--zero", "2"});
  const TemporaryFolder whole, killed;
  const auto weights = whole.file("weights.pt"), resumed_weights = killed.file("weights.pt");
  const auto train = [&](const TemporaryFolder& folder, const Lines& also) {
    auto arguments = tiny(30);
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Lines files{"--batch-size",       "8", "--checkpoint", folder.file("run"),
                      "--checkpoint-every", "7", "--save",       folder.file("weights.pt")};
    arguments.insert(arguments.end(), files.begin(), files.end());
    return transformer_on_two_ranks(arguments, also);
  };
  const auto expected = train(whole, {});
  INFO(expected.output);
  REQUIRE(expected.code == 0);
  CHECK(losses(expected, "loss").back() < losses(expected, "loss").front() - 0.5);

  // Makes the folder look as if the run had been killed in step 15 to 21.
  ddp::testing::run({"mkdir", killed.file("run")});
  ddp::testing::run({"cp", "-r", whole.file("run/step-00000021"), killed.file("run")});
  const auto resumed = train(killed, {"--resume"});
  INFO(resumed.output);
  REQUIRE(resumed.code == 0);
  CHECK_THAT(resumed.output, ContainsText("resumed after step 21"));
  CHECK_THAT(resumed.output, !ContainsText("step 20/30"));
  CHECK(printed_lines(resumed).front() == printed_lines(expected).at(2));
  CHECK(resumed.ranks[0].back() == expected.ranks[0].back());
  CHECK(ddp::testing::run({"cmp", weights, resumed_weights}).code == 0);

  if (!more.empty()) return;
  // Saved weights can be loaded as initial weights.
  const auto loaded = transformer_on_two_ranks(tiny(10), {"--load", weights});
  INFO(loaded.output);
  REQUIRE(loaded.code == 0);
  CHECK(losses(loaded, "loss").front() < losses(expected, "loss").front());
}

TEST_CASE("a run is repeatable, with its dropout", "[examples][process]") {
  const auto more = GENERATE(Lines{"--tp", "2"}, Lines{"--cp", "2"});
  const auto lines_with = [&](const char* dropout) {
    auto arguments = tiny(10);
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto job = transformer_on_two_ranks(arguments, {"--dropout", dropout});
    INFO(job.output);
    CHECK(job.code == 0);  // parameters that several ranks have are equal
    return printed_lines(job);
  };
  const auto once = lines_with("0.3");
  CHECK(once == lines_with("0.3"));
  CHECK(once != lines_with("0"));
}

namespace {

/// 4,000 characters, 27 different ones, which neither 2 nor 4 ranks divide.
std::string letters_and_spaces() {
  std::string text;
  unsigned number = 1;
  while (text.size() < 4000) {
    number = number * 1103515245 + 12345;
    const unsigned letter = number >> 16 & 31;
    text += letter < 26 ? static_cast<char>('a' + letter) : ' ';
  }
  return text;
}

/// One process' run of 8 windows a step, and those of ranks that share them.
class SharedRuns {
 public:
  /// \param more  options of all runs.
  explicit SharedRuns(const Lines& more) {
    // Gradients are longer than 0.1, each step's by another factor.
    arguments_ = {"--text",         folder_.write("text", letters_and_spaces()),
                  "--width",        "32",
                  "--context",      "16",
                  "--heads",        "4",
                  "--layers",       "2",
                  "--steps",        "20",
                  "--warmup",       "5",
                  "--lr",           "0.005",
                  "--clip",         "0.1",
                  "--report-every", "1",
                  "--sample",       "40",
                  "--dropout",      "0"};
    arguments_.insert(arguments_.end(), more.begin(), more.end());
    alone_ = transformer_on(1, arguments_, {"--batch-size", "8"});
  }

  /// \return the largest difference of a loss, in parts of it; infinity if the run failed.
  double distance_of(int ranks, const Lines& share) {
    shared_ = transformer_on(ranks, arguments_, share);
    return distance_of_last(20);
  }

  /// The same for steps 11 to 20, which go on from the checkpoint of ranks that shared otherwise.
  double distance_of_resumed(int ranks, Lines share, int saving_ranks, Lines saving_share) {
    const auto saved = folder_.file("saved"), resumed = folder_.file("resumed");
    ddp::testing::run({"rm", "-rf", saved, resumed});
    saving_share.insert(saving_share.end(), {"--checkpoint", saved, "--checkpoint-every", "10"});
    shared_ = transformer_on(saving_ranks, arguments_, saving_share);
    if (shared_.code != 0) return INFINITY;
    ddp::testing::run({"mkdir", resumed});
    ddp::testing::run({"cp", "-r", saved + "/step-00000010", resumed});
    share.insert(share.end(), {"--checkpoint", resumed, "--resume"});
    shared_ = transformer_on(ranks, arguments_, share);
    return distance_of_last(10);
  }

  /// Whether the last one sampled what one process does.
  bool samples_alike() const { return shared_.ranks[0].back() == alone_.ranks[0].back(); }
  std::string output() const { return alone_.output + shared_.output; }
  const JobEnded& alone() const { return alone_; }

 private:
  double distance_of_last(size_t steps) const {
    double most = 0;
    for (const auto* name : {"loss", "held out"}) {
      auto expected = losses(alone_, name);
      const auto got = losses(shared_, name);
      if (shared_.code != 0 || expected.size() != 20 || got.size() != steps) return INFINITY;
      expected.erase(expected.begin(), expected.end() - static_cast<std::ptrdiff_t>(steps));
      for (size_t i = 0; i < got.size(); ++i) {
        most = std::max(most, std::abs(got[i] - expected[i]) / expected[i]);
      }
    }
    return most;
  }

  const TemporaryFolder folder_;
  Lines arguments_;
  JobEnded alone_, shared_;
};

}  // namespace

TEST_CASE("a transformer that ranks share has the losses of one process", "[examples][process]") {
  const std::vector<std::pair<int, Lines>> shares = {
      {2, {"--tp", "2", "--batch-size", "8"}},
      {4, {"--cp", "2", "--tp", "2", "--batch-size", "8"}},
      {4, {"--tp", "2", "--batch-size", "2", "--accumulate", "2", "--zero", "2"}},
      {4,
       {"--cp", "2", "--batch-size", "2", "--accumulate", "2", "--zero", "1",
        "--checkpoint-activations"}},
      {4,
       {"--fsdp", "--tp", "2", "--batch-size", "2", "--accumulate", "2",
        "--checkpoint-activations"}}};
  SharedRuns runs({});
  for (const auto& [ranks, share] : shares) {
    CAPTURE(ranks, share);
    const double distance = runs.distance_of(ranks, share);
    INFO(runs.output());
    CHECK(distance < 1.5e-5);  // the last of 5 printed digits is 0.3e-5
    CHECK(runs.samples_alike());
  }
}

TEST_CASE("a transformer goes on when ranks share it in another way", "[examples][process]") {
  struct Change {
    int saving_ranks;
    Lines saving_share;
    int ranks;
    Lines share;
  };
  // 27 characters: the ranks of --tp have padding, of other sizes.
  const std::vector<Change> changes = {
      {2, {"--tp", "2", "--batch-size", "8"}, 1, {"--batch-size", "8"}},
      {4, {"--tp", "2", "--batch-size", "4", "--zero", "1"}, 2, {"--cp", "2", "--batch-size", "8"}},
      {4, {"--fsdp", "--batch-size", "2"}, 2, {"--tp", "2", "--batch-size", "8"}},
      {1, {"--batch-size", "8"}, 4, {"--fsdp", "--tp", "2", "--batch-size", "4"}}};
  SharedRuns runs({});
  for (const auto& change : changes) {
    CAPTURE(change.saving_ranks, change.saving_share, change.ranks, change.share);
    const double distance = runs.distance_of_resumed(
        change.ranks, change.share, change.saving_ranks, change.saving_share);
    INFO(runs.output());
    CHECK(distance < 1.5e-5);
    CHECK(runs.samples_alike());
  }
}

TEST_CASE("ranks that share a transformer save and load whole weights", "[examples][process]") {
  const TemporaryFolder folder;
  SharedRuns saving({});
  CHECK(
      saving.distance_of(2, {"--tp", "2", "--batch-size", "8", "--save", folder.file("net.pt")}) <
      1.5e-5);
  INFO(saving.output());
  SharedRuns loading({"--load", folder.file("net.pt")});
  // The first step is small.
  const auto saved = losses(saving.alone(), "held out").at(19);
  CHECK(std::abs(losses(loading.alone(), "held out").at(0) - saved) < 0.03);
  CHECK(loading.distance_of(4, {"--tp", "4", "--batch-size", "8"}) < 1.5e-5);
}

TEST_CASE("a transformer that ranks share learns in bfloat16", "[examples][process]") {
  SharedRuns runs({"--amp"});
  for (const char* option : {"--tp", "--cp"}) {
    const double distance = runs.distance_of(2, {option, "2", "--batch-size", "8"});
    INFO(runs.output());
    CHECK(distance < 5e-3);
  }
}

TEST_CASE("the transformer reports bad input before it trains", "[examples][process][errors]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& output, const std::string& text) {
    INFO(output);
    CHECK_THAT(output, ContainsText("transformer: ") && ContainsText(text));
    CHECK_THAT(output, !ContainsText("step 1") && !ContainsText("frame #"));
  };
  const auto job = transformer_on_two_ranks({"--text", folder.file("none")});
  CHECK(job.code == 1);
  CHECK(job.ranks[0].size() + job.ranks[1].size() <= 2);
  check(job.output, folder.file("none") + ": expected a text, found none");
  const auto refuses = [&](Lines arguments, int code, const std::string& text) {
    arguments.insert(arguments.begin(), TRANSFORMER_PROGRAM);
    const auto ended = ddp::testing::run(arguments);
    CHECK(ended.code == code);
    CHECK(ddp::testing::lines_of(ended.out + ended.err).size() == 1);
    check(ended.out + ended.err, text);
  };
  refuses(
      {"--text", folder.write("short", "too short")}, 1,
      "short: expected at least 650 characters for --context 64");
  refuses({"--batch-size", "100000"}, 1, "--batch-size: expected at most the ");
  refuses(
      {"--tp", "4"}, 2,
      "--tp, --cp: expected a product that divides the number of ranks, 1, got 4 * 1");
  refuses({"--heads", "5"}, 2, "--heads: expected a divisor of --width 128, got 5");
  refuses({"--no-such-option"}, 2, "--no-such-option");
  refuses({"--prompt", "\x01"}, 1, "--prompt: expected characters of ");
  refuses({"--load", folder.write("torn.pt", "PK")}, 1, "torn.pt: expected");
  refuses({"--save", folder.file("missing/net.pt")}, 1, "expected a folder to write to");
}
