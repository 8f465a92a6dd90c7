// Runs ddp_bench as a user starts it.
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "support/processes.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using Lines = std::vector<std::string>;

const Lines kFields = {
    "model",
    "mode",
    "backend",
    "world",
    "bucket_cap_mb",
    "step_ms",
    "step_ms_p10",
    "step_ms_p90",
    "ratio",
    "ratio_low",
    "ratio_high",
    "ratio_of_rounds",
    "cpu_ms",
    "cpu_ratio",
    "cpu_ratio_low",
    "cpu_ratio_high",
    "cpu_ratio_of_rounds",
    "compute_ms",
    "comm_ms",
    "overlap",
    "bytes",
    "checksum"};
const Lines kMemoryFields = {"model",           "mode",         "backend",
                             "world",           "bytes",        "peak_bytes",
                             "anonymous_bytes", "shared_bytes", "file_bytes"};

const Lines kOneRankFields = {"model", "mode", "backend", "world", "step_ms"};
const Lines kTensorParallelFields = {
    "model",       "mode",         "backend",           "world",       "step_ms",       "speedup",
    "speedup_low", "speedup_high", "speedup_of_rounds", "messages_ms", "messages_share"};

const auto kTwoMinutes = within(std::chrono::minutes(2));

JobEnded bench(Lines arguments) {
  arguments.insert(arguments.begin(), DDP_BENCH_PROGRAM);
  for (const char* argument : {"--iters", "2", "--rounds", "1"}) arguments.emplace_back(argument);
  return run_job(2, arguments, kTwoMinutes);
}

/// Returns a line's fields as printed; checks that all are there, in their order.
std::map<std::string, std::string> fields_of(const std::string& line, const Lines& expected) {
  static const std::regex kField(R"re("(\w+)":("[^"]*"|\[[^\]]*\]|[^,}]*))re");
  CAPTURE(line);
  CHECK(line.front() == '{');
  CHECK(line.back() == '}');
  Lines names;
  std::map<std::string, std::string> fields;
  for (std::sregex_iterator it(line.begin(), line.end(), kField), end; it != end; ++it) {
    names.push_back((*it)[1]);
    fields[names.back()] = (*it)[2];
  }
  CHECK(names == expected);
  return fields;
}

std::vector<std::map<std::string, std::string>> results_of(
    const JobEnded& job, const Lines& fields = kFields) {
  INFO(job.output);
  CHECK(job.code == 0);
  CHECK(job.ranks[1].empty());
  CHECK(job.ddprun.empty());
  std::vector<std::map<std::string, std::string>> results;
  for (const auto& line : job.ranks[0]) {
    if (line.find("Warning: ") != std::string::npos) continue;
    results.push_back(fields_of(line, fields));
  }
  return results;
}

double value(const std::map<std::string, std::string>& result, const std::string& field) {
  return std::stod(result.at(field));
}

const Lines kModes = {"none",       "naive",    "flat",       "c10d",
                      "ddp",        "ddp_view", "ddp_unused", "ddp_static",
                      "ddp_finite", "ddp_hook", "ddp_quiet",  "ddp_step"};

void check_modes(
    const std::string& model, const Lines& modes, const std::string& warmup, double bytes) {
  std::string list;
  for (const auto& mode : modes) list += (list.empty() ? "" : ",") + mode;
  const auto results = results_of(bench({"--model", model, "--modes", list, "--warmup", warmup}));
  REQUIRE(results.size() == modes.size());
  std::set<std::string> checksums;
  for (size_t i = 0; i < modes.size(); ++i) {
    const auto& result = results[i];
    CAPTURE(model, modes[i]);
    CHECK(result.at("model") == '"' + model + '"');
    CHECK(result.at("mode") == '"' + modes[i] + '"');
    CHECK(result.at("backend") == "\"shm\"");
    CHECK(result.at("world") == "2");
    CHECK((result.at("bucket_cap_mb") == "null") == (modes[i] != "ddp_tuned"));
    CHECK(0 < value(result, "step_ms_p10"));
    CHECK(value(result, "step_ms_p10") <= value(result, "step_ms"));
    CHECK(value(result, "step_ms") <= value(result, "step_ms_p90"));
    CHECK(result.at("compute_ms") == results[0].at("step_ms"));
    CHECK(value(result, "ratio") > 0);
    CHECK(result.at("ratio_low") == "null");  // with one round
    CHECK(result.at("ratio_of_rounds") == "[" + result.at("ratio") + "]");
    CHECK(value(result, "cpu_ms") > 0);
    CHECK(result.at("cpu_ratio_of_rounds") == "[" + result.at("cpu_ratio") + "]");
    CHECK(0 <= value(result, "overlap"));
    CHECK(value(result, "overlap") <= 1);
    CHECK((value(result, "comm_ms") > 0) == (i > 0));
    CHECK(value(result, "bytes") == (i > 0 ? bytes : 0));
    if (i > 0) checksums.insert(result.at("checksum"));
  }
  CHECK(checksums.size() == 1);
  // Without averages, rank 0 trains on its own data, and the checksum shows it.
  CHECK(checksums.count(results[0].at("checksum")) == 0);
}

}  // namespace

TEST_CASE(
    "each mode prints a line, and all end with the same parameters", "[benchmarks][process]") {
  check_modes("mnist", kModes, "3", 4799528);
  auto modes = kModes;
  modes.emplace_back("ddp_tuned");
  check_modes("small_params", modes, "10", 896000);  // tuning takes 10 steps
}

TEST_CASE("a sweep runs modes with buckets at each size", "[benchmarks][process]") {
  const auto results = results_of(bench(
      {"--model", "small_params", "--modes", "ddp,flat,c10d,ddp_tuned", "--sweep", "0.1,25",
       "--seed", "3"}));
  Lines seen;
  for (const auto& result : results) {
    seen.push_back(result.at("mode") + " " + result.at("bucket_cap_mb"));
    // `none` ran as well, though it was not requested.
    CHECK(value(result, "compute_ms") > 0);
  }
  REQUIRE(seen.size() == 6);
  CHECK(seen.back() != "\"ddp_tuned\" null");  // once, with a size of its own
  CHECK(results.back().at("mode") == "\"ddp_tuned\"");
  seen.pop_back();
  CHECK(seen == Lines{"\"ddp\" 0.1", "\"ddp\" 25", "\"flat\" null", "\"c10d\" 0.1", "\"c10d\" 25"});
}

TEST_CASE("the wrapper's options apply to a run", "[benchmarks][process]") {
  const TemporaryFolder folder;
  const auto file = folder.file("step.json");
  const auto results = results_of(bench(
      {"--model", "small_params", "--modes", "ddp,c10d", "--bucket-cap-mb-list", "0.1,0.3",
       "--no-broadcast-buffers", "--no-init-sync", "--gradient-as-bucket-view", "--timeline",
       file}));
  CHECK(results.size() == 2);
  std::string json;
  std::getline(std::ifstream(file), json);
  // 0.9 MB: by default the first bucket, of 1 MiB, holds all of them.
  CHECK_THAT(json, ContainsText("\"bucket 3\"") && ContainsText("\"optimizer\""));
}

TEST_CASE("memory is measured with one mode in the processes", "[benchmarks][process]") {
  for (const char* mode : {"none", "ddp"}) {
    const auto job = bench({"--model", "mnist", "--memory", "--modes", mode, "--warmup", "3"});
    const auto results = results_of(job, kMemoryFields);
    REQUIRE(results.size() == 1);
    const auto& result = results[0];
    CHECK(value(result, "bytes") == 4799528);
    CHECK(
        value(result, "peak_bytes") ==
        Approx(value(result, "anonymous_bytes") + value(result, "shared_bytes")));
    CHECK(value(result, "file_bytes") > 0);
    // Parameters and gradients at least.
    CHECK(value(result, "peak_bytes") > 2 * 4799528);
    // `none` has a control block in shared memory, but no gradients.
    CHECK((value(result, "shared_bytes") > 1 << 20) == (mode != std::string("none")));
  }
}

TEST_CASE("linear layers are timed on one rank and cut over all", "[benchmarks][process]") {
  const auto job = bench({"--tp", "--warmup", "3"});
  INFO(job.output);
  CHECK(job.code == 0);  // both ended with the same parameters
  CHECK(job.ranks[1].empty());
  REQUIRE(job.ranks[0].size() == 2);
  const auto one_rank = fields_of(job.ranks[0][0], kOneRankFields);
  const auto cut = fields_of(job.ranks[0][1], kTensorParallelFields);
  CHECK(one_rank.at("mode") == "\"one_rank\"");
  CHECK(cut.at("mode") == "\"tensor_parallel\"");
  CHECK(
      value(cut, "speedup") ==
      Approx(value(one_rank, "step_ms") / value(cut, "step_ms")).margin(1e-3));
  CHECK(value(cut, "messages_ms") > 0);
  CHECK(
      value(cut, "messages_share") ==
      Approx(value(cut, "messages_ms") / value(cut, "step_ms")).margin(1e-4));
}

// The table of RESULTS.md comes from these lines (benchmarks/report/tables.py).
TEST_CASE("costs reducer prints a line for each engine", "[benchmarks][process]") {
  const auto ended =
      ddp::testing::run({COSTS_PROGRAM, "reducer", "--blocks", "2", "--rounds", "3"}, kTwoMinutes);
  INFO(ended.out << ended.err);
  CHECK(ended.code == 0);
  const auto lines = lines_of(ended.out);
  Lines engines;
  static const std::regex kLine(R"(([a-z].*[a-z0-9]) +[0-9.]+ +-?[0-9.]+ +-?[0-9.]+)");
  for (size_t i = 1; i < lines.size(); ++i) {
    std::smatch found;
    CAPTURE(lines[i]);
    REQUIRE(std::regex_match(lines[i], found, kLine));
    engines.push_back(found[1]);
  }
  CHECK(
      engines == Lines{
                     "none", "empty hooks", "ddp", "ddp, views", "ddp, unused", "ddp, static",
                     "c10d", "c10d, unused"});
}

TEST_CASE("costs groups prints a line for each way that the ranks allow", "[benchmarks][process]") {
  const auto job = run_job(2, {COSTS_PROGRAM, "groups", "--rounds", "1"}, kTwoMinutes);
  INFO(job.output);
  CHECK(job.code == 0);
  REQUIRE(job.ranks[0].size() == 1);
  CHECK_THAT(job.ranks[0][0], ContainsText("\"new_group of all ranks\", \"ranks\": 2"));
}

TEST_CASE("costs inputs prints what the first passes cost", "[benchmarks][process]") {
  const auto job = run_job(
      2, {COSTS_PROGRAM, "inputs", "--shape", "8,4", "--transposed", "--rounds", "2"}, kTwoMinutes);
  INFO(job.output);
  CHECK(job.code == 0);
  REQUIRE(job.ranks[0].size() == 1);
  CHECK_THAT(job.ranks[0][0], ContainsText("\"check_inputs\", \"ranks\": 2, \"bytes\": 128"));
}

TEST_CASE("every rank reports an error in the command line", "[benchmarks][process][errors]") {
  const std::vector<std::pair<Lines, std::string>> wrong = {
      {{"--tp", "--model", "mlp"}, "ddp_bench: --model excludes --tp"},
      {{"--model", "vgg"}, "ddp_bench: --model: expected one of mnist, mlp"},
      {{"--modes", "none,dpd"}, "ddp_bench: --modes: expected one of none, naive"},
      {{"--sweep", "1,zero"}, "ddp_bench: --sweep: expected MiB greater than 0, got 'zero'"}};
  for (const auto& [arguments, text] : wrong) {
    CAPTURE(text);
    const bool is_first = text == wrong.front().second;
    // Under ddprun the first rank to fail may end the others before they print.
    for (const char* rank : {"0", "1"}) {
      if (!is_first && rank == std::string("0")) continue;
      Lines command = {DDP_BENCH_PROGRAM};
      command.insert(command.end(), arguments.begin(), arguments.end());
      ProcessOptions options;
      options.environment = {
          std::string("RANK=") + rank, std::string("LOCAL_RANK=") + rank, "WORLD_SIZE=2"};
      const auto ended = ddp::testing::run(command, options);
      CHECK(ended.code == 2);
      CHECK(ended.out.empty());
      CHECK(lines_of(ended.err).size() == 1);
      CHECK_THAT(ended.err, ContainsText(text));
    }
    if (!is_first) continue;
    const auto job = bench(arguments);
    CHECK(job.code == 2);
    CHECK_THAT(job.output, ContainsText(text));
  }
}

TEST_CASE("the program reports invalid options", "[benchmarks][process][errors]") {
  const auto backend = bench({"--backend", "pigeon"});
  CHECK(backend.code == 2);
  CHECK_THAT(
      backend.output,
      // Both ranks find it, and both throw what the first one reports.
      ContainsText("ddp_bench: init_process_group on rank ") &&
          ContainsText(" of 2: backend(): expected gloo,") && ContainsText("got \"pigeon\""));

  const auto timeline = bench({"--model", "small_params", "--timeline", "/nowhere/step.json"});
  CHECK(timeline.code == 1);
  CHECK_THAT(timeline.output, ContainsText("--timeline /nowhere/step.json: expected a file"));
}
