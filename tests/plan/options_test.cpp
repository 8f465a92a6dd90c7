// ddp_plan's command line.
#include "plan/options.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "plan/model.h"

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace {

using Words = std::vector<std::string>;

struct Parse {
  explicit Parse(Words words) {
    std::vector<const char*> argv = {"ddp_plan"};
    for (const auto& word : words) argv.push_back(word.c_str());
    std::ostringstream out_stream, err_stream;
    parsed = ddp::plan::parse_options(
        static_cast<int>(argv.size()), argv.data(), out_stream, err_stream);
    out = out_stream.str();
    err = err_stream.str();
  }
  ddp::plan::ParsedOptions parsed;
  std::string out, err;
};

Words with(const Words& more) {
  Words words = {"--parameters", "1.3e9", "--layers", "24",   "--hidden", "2048",
                 "--sequence",   "2048",  "--batch",  "64",   "--ranks",  "16",
                 "--memory",     "40",    "--gflops", "15000"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

}  // namespace

TEST_CASE("ddp_plan's options reach the task in bytes and seconds", "[pure]") {
  const Parse parse(with(
      {"--hosts",
       "2",
       "--vocabulary",
       "50257",
       "--checkpoint",
       "--microbatches",
       "8",
       "--sum-us",
       "60",
       "--layer-us",
       "250",
       "--update-ns",
       "1.5",
       "--cores",
       "4",
       "--link",
       "200",
       "--link-us",
       "2",
       "--network",
       "25",
       "--network-us",
       "20",
       "--overlap",
       "0.5",
       "--top",
       "3",
       "--json"}));
  INFO(parse.err);
  REQUIRE(parse.parsed.options);
  const auto& [task, top, json] = *parse.parsed.options;
  CHECK(task.model.parameters == 1300000000);
  CHECK(task.model.heads == 32);  // hidden / 64
  CHECK(task.model.vocabulary == 50257);
  CHECK(task.model.checkpoint);
  CHECK(task.model.layer_us == 250);
  CHECK(task.model.sum_us == 60);
  CHECK(task.model.update_ns == 1.5);
  CHECK(task.batch == 64);
  CHECK(task.microbatches == 8);
  CHECK(task.cluster.ranks_a_host() == 8);
  CHECK(task.cluster.crowding() == 2);
  CHECK(task.cluster.memory == 40e9);
  CHECK(task.cluster.operations == 15e12);
  CHECK(task.cluster.host.rate == 200e9);
  CHECK(task.cluster.host.latency == Approx(2e-6));
  CHECK(task.cluster.network.rate == 25e9);
  CHECK(task.cluster.network.latency == Approx(20e-6));
  CHECK(task.cluster.overlap == 0.5);
  CHECK(top == 3);
  CHECK(json);
  CHECK(Parse(with({"--heads", "16"})).parsed.options->task.model.heads == 16);
}

TEST_CASE("ddp_plan says in one line what is wrong with its command line", "[pure][errors]") {
  const auto refused = [](const Words& more, const std::string& text) {
    const Parse parse(with(more));
    CAPTURE(text);
    CHECK_FALSE(parse.parsed.options);
    CHECK(parse.parsed.exit_code == 2);
    CHECK_THAT(parse.err, ContainsText("ddp_plan: ") && ContainsText(text));
    CHECK_THAT(parse.err, ContainsText("(ddp_plan --help lists the options)\n"));
    CHECK(parse.err.find('\n') + 1 == parse.err.size());
  };
  refused({"--hosts", "3"}, "--ranks: expected a multiple of --hosts 3, got 16");
  refused({"--heads", "3"}, "--heads: expected a divisor of --hidden 2048, got 3");
  refused(
      {"--vocabulary", "1000000"},
      "--parameters: expected more than the table of tokens has, --vocabulary * --hidden = "
      "2048000000, got 1300000000");
  refused({"--network", "nan"}, "--network: expected a number from 1e-09 to 1e+09, got nan");
  refused({"--overlap", "1.5"}, "--overlap");
  refused({"--top", "0"}, "--top");
  refused({"--no-such"}, "--no-such");
  const Parse nothing(Words{});
  CHECK(nothing.parsed.exit_code == 2);
  CHECK_THAT(nothing.err, ContainsText("is required"));
}

TEST_CASE("ddp_plan --help and --version print and succeed", "[pure]") {
  const Parse help(Words{"--help"});
  CHECK(help.parsed.exit_code == 0);
  CHECK_THAT(help.out, ContainsText("--gflops") && ContainsText("Example: "));
  CHECK_THAT(Parse(Words{"--version"}).out, ContainsText("ddp_plan 0."));
}

TEST_CASE("a run takes the place of a rate", "[pure]") {
  const ddp::testing::TemporaryFolder folder;
  const auto file = folder.path() + "/run.json";
  std::ofstream(file)
      << "{\"world_size\": 16, \"rank\": 0, \"bytes_at_peak\": {\"other\": 5000}, "
         "\"collectives\": [{\"axis\": \"world\", \"kind\": \"all_reduce\", \"ranks\": 16, "
         "\"calls\": 3, \"bytes\": 10400000000}], \"compute_ms\": 100000}";
  auto words = with({"--measured", file});
  const Parse both(words);
  CHECK_FALSE(both.parsed.options);
  CHECK_THAT(both.err, ContainsText("--gflops: expected it, or --measured in its place, got both"));
  const auto rate = std::find(words.begin(), words.end(), "--gflops");
  words.erase(rate, rate + 2);
  const Parse one(words);
  CAPTURE(one.err);
  REQUIRE(one.parsed.options);
  const auto& task = one.parsed.options->task;
  // 4 samples a rank: their operations in 100 s.
  const double operations = 4 * ddp::plan::step_operations(task.model);
  CHECK(task.cluster.operations == Approx(operations / 100));
  CHECK(task.model.corrections.beside == 5000);
  CHECK(task.model.corrections.data_bytes == Approx(2));  // 1.3e9 parameters of 4 bytes
  words.resize(words.size() - 2);
  const Parse none(words);
  CHECK(none.parsed.exit_code == 2);
  CHECK_THAT(
      none.err, ContainsText("--gflops: expected it, or --measured in its place, got neither"));
  std::ofstream(file) << "{}";
  words.insert(words.end(), {"--measured", file});
  const Parse bad(words);
  CHECK(bad.parsed.exit_code == 2);
  CHECK_THAT(bad.err, ContainsText("--measured: " + file + ": expected \"world_size\", got none"));
}
