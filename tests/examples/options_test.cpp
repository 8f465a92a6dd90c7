#include "examples/mnist/options.h"
#include "support/error_of.h"

#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"

namespace {

std::optional<mnist::Options> parse(std::vector<const char*> arguments, std::ostream& help) {
  arguments.insert(arguments.begin(), "mnist");
  return mnist::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

mnist::Options parse(const std::vector<const char*>& arguments) {
  std::ostringstream help;
  return parse(arguments, help).value();
}

std::string refused(const std::vector<const char*>& arguments) {
  return ddp::testing::error_of<mnist::UsageError>([&] { parse(arguments); });
}

}  // namespace

TEST_CASE("each option reaches its field", "[examples][pure]") {
  const auto options = parse(
      {"--epochs", "3", "--batch-size=16", "--lr", "0.5", "--seed", "7", "--backend", "gloo",
       "--bucket-cap-mb", "0.5", "--threads", "2", "--data", "/d", "--save", "net.pt", "--trace",
       "trace.json"});
  CHECK(options.epochs == 3);
  CHECK(options.batch_size == 16);
  CHECK(options.lr == 0.5);
  CHECK(options.seed == 7);
  CHECK(options.backend == "gloo");
  CHECK(options.bucket_cap_mb == 0.5);
  CHECK(options.threads == 2);
  CHECK(options.data == "/d");
  CHECK(options.save == "net.pt");
  CHECK(options.trace == "trace.json");
  CHECK_FALSE(options.tune_bucket_cap);
  CHECK(parse({"--tune-bucket-cap"}).tune_bucket_cap);
}

TEST_CASE("without options the defaults apply", "[examples][pure]") {
  const auto options = parse(std::vector<const char*>{});
  const mnist::Options defaults;
  CHECK(options.epochs == defaults.epochs);
  CHECK(options.data == defaults.data);
  CHECK(options.backend.empty());
  CHECK_FALSE(options.bucket_cap_mb.has_value());
  CHECK(options.save.empty());
}

TEST_CASE("--help names every option and its default", "[examples][pure]") {
  std::ostringstream help;
  CHECK_FALSE(parse({"--help"}, help).has_value());
  for (const char* option :
       {"--epochs", "--batch-size", "--lr", "--seed", "--backend", "--bucket-cap-mb", "--threads",
        "--tune-bucket-cap", "--data", "--save", "--trace", "--leave-on-signal"}) {
    CHECK_THAT(help.str(), ContainsText(option));
  }
  CHECK_THAT(help.str(), ContainsText("=6 ") || ContainsText("[6]"));  // depends on CLI11's version
}

TEST_CASE("invalid values are refused in one line", "[examples][errors]") {
  const std::vector<std::vector<const char*>> all = {
      {"--epochs", "0"},
      {"--epochs", "many"},
      {"--epochs"},
      {"--batch-size", "-1"},
      {"--lr", "0"},
      {"--lr", "nan"},
      {"--lr", "inf"},
      {"--seed", "-1"},
      {"--bucket-cap-mb", "0"},
      {"--bucket-cap-mb", "-1"},
      {"--threads", "-1"},
      {"--no-such-option"},
      {"stray"}};
  for (const auto& arguments : all) {
    CAPTURE(arguments);
    const auto message = refused(arguments);
    CHECK_THAT(message, ContainsText(arguments[0]));
    CHECK_THAT(message, ContainsText("(mnist --help lists the options)"));
    CHECK(message.find('\n') == std::string::npos);
  }
}
