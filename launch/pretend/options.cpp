#include "launch/pretend/options.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <utility>

#include <ddp/internal/ranges.h>

#include "launch/pretend/rank_list.h"
#include "launch/texts.h"
#include "launch/validators.h"

namespace ddp::launch {
namespace {

constexpr const char* kPretendGroup = "Options of pretended worlds, and of lists of calls";
constexpr int kMostPretended = 1 << 20;
constexpr int kRanksAHost = 8;
constexpr const char* kLatency = "5us";

using Unit = std::pair<const char*, double>;

/// A number and a unit after it.
std::optional<double> quantity(const std::string& text, std::initializer_list<Unit> units) {
  const auto end = std::min(text.find_first_not_of("0123456789."), text.size());
  double value = 0;
  if (end == 0 || !CLI::detail::lexical_cast(text.substr(0, end), value)) return std::nullopt;
  for (const auto& [name, factor] : units) {
    if (text.substr(end) == name && std::isfinite(value)) return value * factor;
  }
  return std::nullopt;
}

CLI::Validator rate_text() {
  const auto check = [](const std::string& text) {
    if (parse_rate(text).value_or(0) > 0) return std::string();
    return "expected a rate such as 50GB/s, 800MB/s or 400Gbit/s, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator duration_text() {
  const auto check = [](const std::string& text) {
    if (parse_duration(text)) return std::string();
    return "expected a time such as 5us, 800ns or 0.1ms, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

void expect_beside(
    const CLI::App& app, std::initializer_list<const char*> names, const std::string& rule) {
  for (const char* name : names) {
    if (app.count(name) > 0) {
      throw CLI::ValidationError(std::string(name) + ": expected " + rule);
    }
  }
}

std::vector<int> present_ranks(const GivenPretended& given) {
  const int size = *given.size;
  auto ranks = given.present == "all"
                   ? numbers_up_to(size)
                   : parse_rank_list(given.present, size).value_or(std::vector<int>());
  if (ranks.empty()) {
    throw CLI::ValidationError(
        "--ranks: expected all, or ranks below " + std::to_string(size) +
        " as 0,7 or 0-7 or 0-1016:8, got '" + given.present + "'");
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.size() > kMaxLocalRanks) {
    throw CLI::ValidationError(
        "--ranks: expected no more than " + std::to_string(kMaxLocalRanks) +
        " ranks, each a process here, got " + std::to_string(ranks.size()));
  }
  return ranks;
}

void apply_world(
    const CLI::App& app, const GivenPretended& given, const std::string& ranks,
    LaunchOptions& options) {
  expect_beside(
      app,
      {"--nnodes", "--node-rank", "--rdzv-endpoint", "--master-addr", "--host", "--hostfile",
       "--np", "--max-restarts", "--elastic", "--coordinate"},
      "no --pretend beside it, whose ranks are on this host");
  if (given.present.empty()) {
    throw CLI::ValidationError(
        "--pretend: expected --ranks beside it, the ranks to run here: 7, or 0,7,512, or all");
  }
  if (given.ranks_a_host && !ranks.empty()) {
    throw CLI::ValidationError("--per-host: expected no -n beside it, which says the same here");
  }
  const auto a_host = ranks.empty() ? given.ranks_a_host.value_or(kRanksAHost)
                                    : number_in(ranks, 1, kMaxLocalRanks).value_or(0);
  if (a_host == 0) {
    throw CLI::ValidationError(
        "--nproc-per-node: expected the number of ranks of a host beside --pretend, got '" + ranks +
        "'");
  }
  PretendedWorld world{*given.size, std::min(a_host, *given.size), present_ranks(given)};
  options.local_ranks = static_cast<int>(world.present.size());
  options.ranks_of_nodes.clear();
  options.pretended = std::move(world);
}

/// Bytes a second and seconds, where the command line has them.
std::optional<Links> links_of(const CLI::App& app, const GivenPretended& given) {
  if (given.link.empty()) {
    expect_beside(app, {"--intra", "--latency"}, "--link beside it");
    return std::nullopt;
  }
  Links links;
  links.network_rate = *parse_rate(given.link);
  links.host_rate = given.intra.empty() ? links.network_rate : *parse_rate(given.intra);
  links.latency = *parse_duration(given.latency.empty() ? kLatency : given.latency);
  return links;
}

}  // namespace

std::optional<double> parse_rate(const std::string& text) {
  return quantity(
      text, {{"B/s", 1},
             {"KB/s", 1e3},
             {"MB/s", 1e6},
             {"GB/s", 1e9},
             {"TB/s", 1e12},
             {"Mbit/s", 1e6 / 8},
             {"Gbit/s", 1e9 / 8}});
}

std::optional<double> parse_duration(const std::string& text) {
  return quantity(text, {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}});
}

void add_pretend_options(CLI::App& app, GivenPretended& given, LaunchOptions& options) {
  const auto named = [](CLI::Option* option, const char* type) {
    option->group(kPretendGroup);
    if (type[0] != '\0') option->type_name(type);
  };
  named(
      app.add_option(
             "--pretend", given.size,
             "Run single ranks of a world of N, whose collectives each rank answers itself")
          ->check(whole_number(1, kMostPretended)),
      "N");
  named(
      app.add_option(
          "--rank,--ranks", given.present,
          "With --pretend, the ranks that run here: 7, or 0,7,512, or 0-1016:8, or all"),
      "RANKS");
  named(
      app.add_option(
             "--per-host", given.ranks_a_host,
             "With --pretend, the ranks of a host, as -n. Default: 8")
          ->check(whole_number(1, kMaxLocalRanks)),
      "RANKS");
  named(
      app.add_option(
             "--link", given.link,
             "Between hosts, as 50GB/s or 400Gbit/s: the report has the time of a step")
          ->check(rate_text()),
      "RATE");
  named(
      app.add_option("--intra", given.intra, "Between ranks of one host. Default: as --link")
          ->check(rate_text()),
      "RATE");
  named(
      app.add_option("--latency", given.latency, "Of a short message. Default: 5us")
          ->check(duration_text()),
      "TIME");
  named(
      app.add_option(
             "--calls", options.calls.folder,
             "Ranks write lists of their calls: rank_0.calls, ... Default with --pretend: "
             "a temporary folder")
          ->check(not_empty("a folder")),
      "FOLDER");
  named(
      app.add_option(
             "--check", options.calls.check,
             "Run nothing, and report on the lists of calls that are there")
          ->check(not_empty("a folder")),
      "FOLDER");
  named(
      app.add_flag(
          "--json", options.calls.json,
          "The report as one JSON object on stdout; the ranks' stdout goes to stderr"),
      "");
}

bool needs_no_ranks(const LaunchOptions& options, const GivenPretended& given) {
  return given.size || !options.calls.check.empty();
}

void apply_pretend_options(
    const CLI::App& app, const GivenPretended& given, const std::string& ranks,
    LaunchOptions& options) {
  auto& calls = options.calls;
  if (!given.size) {
    expect_beside(app, {"--ranks", "--per-host"}, "--pretend beside it");
    if (calls.check.empty()) {
      expect_beside(
          app, {"--link", "--intra", "--latency", "--json"}, "--pretend or --check beside it");
    }
  }
  if (!calls.check.empty() && (given.size || !calls.folder.empty() || !options.command.empty())) {
    throw CLI::ValidationError(
        "--check: expected no --pretend, --calls or program beside it, for it runs nothing");
  }
  if (!calls.folder.empty()) {
    expect_beside(
        app, {"--host", "--hostfile"}, "no --calls beside it: give -x DDP_CALLS_DIR=FOLDER");
    // Programs may change their folder.
    calls.folder = std::filesystem::absolute(calls.folder).string();
  }
  calls.links = links_of(app, given);
  if (given.size) apply_world(app, given, ranks, options);
  if (calls.json && app.count("--no-prefix") > 0) {
    throw CLI::ValidationError(
        "--json: expected no --no-prefix beside it, with which ranks write to stdout");
  }
}

}  // namespace ddp::launch
