// Runs the transformer's example as a user starts it.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"
#include "transformer_runs.h"

#include "support/catch.h"

namespace {

using ddp::testing::JobEnded;
using ddp::testing::TemporaryFolder;
using transformer_runs::Lines;
using transformer_runs::losses;
using transformer_runs::SharedRuns;
using transformer_runs::transformer_on;

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
    CHECK(runs.sizes_alike());
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
    CHECK(runs.distance_of_saving(change.saving_ranks, change.saving_share) < 1.5e-5);
    const double distance = runs.distance_of_resumed(change.ranks, change.share);
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
      "--pp, --cp, --tp: expected a product that divides the number of ranks, 1, got 1 * 1 * 4");
  refuses(
      {"--dp", "2"}, 2,
      "--dp: expected 1, so that --pp * --dp * --cp * --tp is the number of ranks, 1, got 2");
  refuses({"--heads", "5"}, 2, "--heads: expected a divisor of --width 128, got 5");
  refuses({"--no-such-option"}, 2, "--no-such-option");
  refuses({"--prompt", "\x01"}, 1, "--prompt: expected characters of ");
  refuses({"--load", folder.write("torn.pt", "PK")}, 1, "torn.pt: expected");
  refuses({"--save", folder.file("missing/net.pt")}, 1, "expected a folder to write to");
}
