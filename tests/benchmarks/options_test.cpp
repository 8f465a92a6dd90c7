#include "benchmarks/ddp_bench/options.h"
#include "support/error_of.h"

#include <sstream>

#include <torch/torch.h>

#include "support/catch.h"

namespace {

using Names = std::vector<std::string>;
using Sizes = std::vector<double>;

std::optional<ddp_bench::Options> parse(std::vector<const char*> arguments, std::ostream& help) {
  arguments.insert(arguments.begin(), "ddp_bench");
  return ddp_bench::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

ddp_bench::Options parse(const std::vector<const char*>& arguments) {
  std::ostringstream help;
  return parse(arguments, help).value();
}

std::string refused(const std::vector<const char*>& arguments) {
  return ddp::testing::error_of<ddp_bench::UsageError>([&] { parse(arguments); });
}

}  // namespace

TEST_CASE("the command line selects the measurements", "[benchmarks][pure]") {
  const auto options = parse(
      {"--model",   "resnet18", "--modes", "ddp_view,none", "--iters",    "3",      "--rounds",
       "2",         "--warmup", "4",       "--threads",     "2",          "--seed", "7",
       "--backend", "gloo",     "--sweep", "0.5,10",        "--timeline", "t.json"});
  CHECK(options.model == "resnet18");
  CHECK(options.modes == Names{"ddp_view", "none"});
  CHECK(options.iters == 3);
  CHECK(options.rounds == 2);
  CHECK(options.warmup == 4);
  CHECK(options.threads == 2);
  CHECK(options.seed == 7);
  CHECK(options.backend == "gloo");
  CHECK(options.sweep == Sizes{0.5, 10});
  CHECK(options.timeline == "t.json");
  CHECK_FALSE(options.memory);
  CHECK(options.dtype == at::kFloat);
  CHECK(options.batch == 1);
  const auto larger = parse({"--dtype", "bfloat16", "--batch", "8"});
  CHECK(larger.dtype == at::kBFloat16);
  CHECK(larger.batch == 8);
  CHECK_THAT(refused({"--dtype", "float8"}), ContainsText("one of float32, bfloat16"));
  CHECK_THAT(refused({"--batch", "0"}), ContainsText("--batch"));
  CHECK(parse({"--memory", "--modes", "ddp"}).memory);
}

TEST_CASE("the command line sets the wrapper's options", "[benchmarks][pure]") {
  const auto defaults = parse(std::vector<const char*>{}).wrapper;
  CHECK_FALSE(defaults.bucket_cap_mb().has_value());
  CHECK(defaults.reduction() == ddp::Reduction::Mean);
  CHECK(defaults.broadcast_buffers());
  CHECK(defaults.init_sync());
  CHECK_FALSE(defaults.find_unused_parameters());
  CHECK_FALSE(defaults.gradient_as_bucket_view());
  CHECK_FALSE(defaults.static_graph());

  const auto given = parse({"--bucket-cap-mb", "5", "--reduction", "sample_weighted",
                            "--no-broadcast-buffers", "--no-init-sync", "--find-unused-parameters",
                            "--gradient-as-bucket-view", "--static-graph", "--stats-every", "7"})
                         .wrapper;
  CHECK(given.bucket_cap_mb() == 5);
  CHECK(given.reduction() == ddp::Reduction::SampleWeighted);
  CHECK(given.stats_every() == 7);
  CHECK_FALSE(given.broadcast_buffers());
  CHECK_FALSE(given.init_sync());
  CHECK(given.find_unused_parameters());
  CHECK(given.gradient_as_bucket_view());
  CHECK(given.static_graph());
  CHECK(parse({"--bucket-cap-mb-list", "1,2"}).wrapper.bucket_cap_mb_list() == Sizes{1, 2});
}

TEST_CASE("--help lists options and modes", "[benchmarks][pure]") {
  std::ostringstream help;
  CHECK_FALSE(parse({"--help"}, help).has_value());
  for (const char* text :
       {"--model", "--modes", "--iters", "--rounds", "--warmup", "--sweep", "--bucket-cap-mb",
        "--timeline", "ddp_static", "c10d::Reducer", "Example:"}) {
    CHECK_THAT(help.str(), ContainsText(text));
  }
}

TEST_CASE("an invalid command line is reported in one line", "[benchmarks][pure][errors]") {
  struct Case {
    std::vector<const char*> arguments;
    const char* text;
  };
  for (const auto& [arguments, text] : std::vector<Case>{
           {{"--model", "vgg"}, "--model: expected one of mnist, mlp"},
           {{"--modes", "none,dpd"}, "got 'dpd'"},
           {{"--modes", "ddp,ddp"}, "--modes: expected each mode once"},
           {{"--sweep", "1,zero"}, "--sweep: expected MiB greater than 0, got 'zero'"},
           {{"--sweep", "1,-5"}, "--sweep: expected MiB greater than 0, got '-5'"},
           {{"--sweep", "0"}, "--sweep: expected MiB greater than 0, got '0'"},
           {{"--sweep", "inf"}, "--sweep: expected MiB greater than 0, got 'inf'"},
           {{"--modes", "none,flat", "--sweep", "1"}, "--sweep: expected a mode with buckets"},
           {{"--sweep", "1", "--bucket-cap-mb", "5"}, "--sweep"},
           {{"--bucket-cap-mb", "5", "--bucket-cap-mb-list", "5"}, "--bucket-cap-mb"},
           {{"--modes", "none,ddp_tuned", "--bucket-cap-mb-list", "1,2"},
            "--bucket-cap-mb-list: expected modes without ddp_tuned"},
           {{"--memory"}, "--memory: expected one mode"},
           {{"--memory", "--modes", "ddp", "--sweep", "1"}, "--memory: expected neither --sweep"},
           {{"--memory", "--modes", "ddp", "--timeline", "f"}, "--memory: expected neither"},
           {{"--reduction", "sum"}, "--reduction: expected one of mean, sample_weighted"},
           {{"--stats-every", "-1"}, "--stats-every"},
           {{"--iters", "0"}, "--iters"},
           {{"--rounds", "x"}, "--rounds"},
           {{"--warmup", "2"}, "--warmup"},
           {{"--warmup", "9", "--modes", "ddp_tuned"}, "10 steps for mode ddp_tuned"},
           {{"--nonsense"}, "--nonsense"}}) {
    const auto message = refused(arguments);
    CAPTURE(arguments.front());
    CHECK_THAT(message, ContainsText(text));
    CHECK(message.find('\n') == std::string::npos);
  }
}
