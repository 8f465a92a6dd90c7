#include "launch/options.h"

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>

#include <CLI/CLI.hpp>

#include <ddp/internal/membership/address.h>

namespace ddp::launch {
namespace {

// The limit of one host's ranks; a larger number is more likely a typo than a machine.
constexpr int kMaxLocalRanks = 1024;
constexpr int kMaxNodes = 65536;
constexpr int kMaxRestarts = 1000000;
constexpr int kElasticRestarts = 10;
constexpr double kMaxGraceSeconds = 86400;

constexpr const char* kDescription =
    "Runs one program as the ranks of a distributed job and ends them together.";

constexpr const char* kDetails = R"(
Each rank finds in its environment RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS, TORCHELASTIC_RESTART_COUNT and
TORCHELASTIC_MAX_RESTARTS, as under torchrun.
Rank 0 reads ddprun's standard input, the others /dev/null. Each line a rank writes is prefixed
with its rank: '[1] loss 0.3'. A line is kept whole up to 16 MiB; a longer one may be broken where
another rank speaks. Ranks write to pseudo-terminals, so lines come as they are written and none is
lost in a crash; a file or a pipe gets them without escape sequences, and of a progress bar the end.

When a rank fails, ddprun says which and why, sends SIGTERM to the others, SIGKILL after the
grace period, and exits with that rank's code (128 + the signal's number if one killed it).
With --max-restarts all ranks then start again, with a port of their own, until one attempt
succeeds or none is left: the program goes on from its last checkpoint, if it loads one. What ends
by a signal to ddprun is not started again. Several hosts agree on it at the endpoint, where node 0's
ddprun listens; the ranks' own MASTER_PORT is then another one, and every ddprun waits for the others.
With --elastic only the rank that failed is started again, where the program speaks with the
coordinator at DDP_COORDINATOR; a program that does not is restarted as above.
SIGINT, SIGTERM, SIGHUP and SIGQUIT go to all ranks; what still runs after the grace period, or
at a second SIGINT, is killed, and ddprun exits with 128 + the signal's number.
SIGUSR1 and SIGUSR2 are passed on in the same way, and the job goes on; ranks that then leave with
code 143 (ddp::PreemptionNotice) are not started again.
Nothing that a rank started outlives the job, even when ddprun itself is killed.

Options that are not given are taken from PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK,
PET_RDZV_ENDPOINT, PET_MASTER_ADDR, PET_MASTER_PORT, PET_MAX_RESTARTS and PET_LOG_DIR, as by
torchrun; Kubeflow sets them.

Exit code: 0 when every rank exited with 0; 2 bad usage; 126 the program cannot be executed;
127 it was not found; 141 nobody reads ddprun's output any more; else as above.

Examples:
  ddprun -n 2 ./train --epochs 6
  ddprun -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29500 ./train
  ddprun -n 8 --max-restarts 3 --log-dir logs ./train --checkpoint runs/a --resume
)";

/// Accepts decimal integers in [low, high] only: no signs, no fractions, no overflow.
CLI::Validator whole_number(int low, int high) {
  const auto check = [low, high](const std::string& text) {
    int value = 0;
    const auto* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end && low <= value && value <= high) return std::string();
    return "expected a whole number from " + std::to_string(low) + " to " + std::to_string(high) +
           ", got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator seconds() {
  const auto check = [](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
    if (is_number && 0 <= value && value <= kMaxGraceSeconds) return std::string();
    return "expected seconds from 0 to 86400, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

/// \param thing  "a host".
CLI::Validator not_empty(const std::string& thing) {
  const auto check = [thing](const std::string& text) {
    return text.empty() ? "expected " + thing + ", got ''" : std::string();
  };
  return CLI::Validator(check, "");
}

/// Finds the last colon: an IPv6 address has more colons, and brackets around it.
size_t port_separator(const std::string& endpoint) { return endpoint.rfind(':'); }

CLI::Validator endpoint() {
  const auto check = [](const std::string& text) {
    const auto colon = port_separator(text);
    int port = 0;
    const auto* end = text.data() + text.size();
    if (colon != std::string::npos && colon > 0) {
      const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, port);
      if (error == std::errc() && stop == end && 1 <= port && port <= 65535) return std::string();
    }
    return "expected HOST:PORT with a port from 1 to 65535, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

/// A value that is part of a line, so without spaces.
CLI::Validator word() {
  const auto check = [](const std::string& text) {
    const bool is_word = !text.empty() && text.find_first_of(" \t\r\n/") == std::string::npos;
    return is_word ? std::string() : "expected a word without spaces and '/', got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator coordinator() {
  const auto check = [](const std::string& text) {
    try {
      (void)membership::parse_address(text);
      return std::string();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
  };
  return CLI::Validator(check, "");
}

/// Adds the program and its arguments to CLI11's usage line.
class HelpFormatter : public CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: ddprun -n RANKS [options] [--] program [arguments...]\n";
  }
};

/// Returns the arguments that CLI11 left over, without the separator; throws when they do not start
/// with a program.
std::vector<std::string> extract_command(std::vector<std::string> rest) {
  const bool separated = !rest.empty() && rest.front() == "--";
  if (separated) rest.erase(rest.begin());
  if (rest.empty()) {
    throw CLI::ValidationError("expected a program to run after the options, got nothing");
  }
  const std::string& program = rest.front();
  if (program.empty()) throw CLI::ValidationError("expected a program's name, got ''");
  if (!separated && program.front() == '-') {
    throw CLI::ValidationError(
        "unknown option '" + program + "'; a program of that name goes after --");
  }
  return rest;
}

/// Records which options the command line gave, where LaunchOptions cannot show it.
struct Given {
  bool standalone = false;
  bool no_prefix = false;
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
  std::optional<std::string> endpoint;
  std::optional<int> omp_threads;
  std::optional<double> grace_seconds;
  std::optional<int> max_restarts;
  bool elastic = false;
  std::optional<int> min_ranks, max_ranks, coordinate;
  std::optional<double> lost_after, wait, hold;
  std::string coordinator, token, state;  // empty: not given
};

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void add_hosts(CLI::App& app, LaunchOptions& options, Given& given) {
  app.add_option("-n,--nproc-per-node", options.local_ranks, "Ranks to run on this host")
      ->check(whole_number(1, kMaxLocalRanks))
      ->type_name("RANKS");
  app.add_flag(
      "--standalone", given.standalone,
      "One host, on a free port that ddprun reserves (the default)");
  app.add_option("--nnodes", options.nodes, "Hosts in the job. Default: 1")
      ->check(whole_number(1, kMaxNodes))
      ->type_name("N");
  app.add_option("--node-rank", options.node_rank, "Which of them this is. Default: 0")
      ->check(whole_number(0, kMaxNodes - 1))
      ->type_name("R");
  app.add_option(
         "--master-addr", given.master_addr,
         "Rank 0's host, as all hosts reach it. Default: 127.0.0.1, or ::1 without IPv4")
      ->check(not_empty("a host"))
      ->type_name("HOST");
  app.add_option(
         "--master-port", given.master_port,
         "Rank 0's port. Default with one host: ddprun reserves one")
      ->check(whole_number(1, 65535))
      ->type_name("PORT");
  app.add_option(
         "--rdzv-endpoint", given.endpoint,
         "--master-addr and --master-port in one, as torchrun has it")
      ->check(endpoint())
      ->type_name("HOST:PORT");
}

void add_attempts(CLI::App& app, LaunchOptions& options, Given& given) {
  app.add_option(
         "--max-restarts", given.max_restarts,
         "How often all ranks start again after one has failed.\nThe same on every host. Default: "
         "0; with --elastic how often a rank is replaced: 10")
      ->check(whole_number(0, kMaxRestarts))
      ->type_name("N");
  app.add_option(
         "--log-dir", options.log_dir, "Keep what each rank writes, too: attempt_0/rank_0.log, ...")
      ->check(not_empty("a folder"))
      ->type_name("FOLDER");
}

void add_ranks(CLI::App& app, Given& given) {
  app.add_option(
         "--omp-threads", given.omp_threads,
         "OMP_NUM_THREADS of each rank. Default: as it is set;\n"
         "otherwise the host's cores / RANKS, at least 1")
      ->check(whole_number(1, 65536))
      ->type_name("N");
  app.add_option(
         "--grace", given.grace_seconds,
         "How long the ranks may take to end before SIGKILL.\n"
         "Default: 3 when a rank failed, 5 when ddprun got a signal")
      ->check(seconds())
      ->type_name("SECONDS");
  app.add_flag(
      "--no-prefix", given.no_prefix,
      "The ranks write to ddprun's own output: a terminal stays a terminal");
}

void add_elastic(CLI::App& app, Given& given) {
  app.add_flag(
      "--elastic", given.elastic,
      "Replace a rank that fails, and keep the others, where the program takes part");
  app.add_option("--min-ranks", given.min_ranks, "Ranks to go on with. Default: all")
      ->check(whole_number(1, kMaxLocalRanks * kMaxNodes))
      ->type_name("N");
  app.add_option(
         "--max-ranks", given.max_ranks,
         "More ranks wait until they are needed. Default: RANKS on each host")
      ->check(whole_number(1, kMaxLocalRanks * kMaxNodes))
      ->type_name("N");
  app.add_option(
         "--hold", given.hold,
         "With fewer ranks than all, wait for a replacement before training goes on. Default: 0")
      ->check(seconds())
      ->type_name("SECONDS");
  app.add_option(
         "--lost-after", given.lost_after,
         "Without a sign of life a rank counts as lost. Default: 10")
      ->check(seconds())
      ->type_name("SECONDS");
  app.add_option("--wait", given.wait, "With too few ranks, before the job ends. Default: 600")
      ->check(seconds())
      ->type_name("SECONDS");
  app.add_option(
         "--coordinate", given.coordinate,
         "Run no ranks, but decide who is a member, for --coordinator elsewhere")
      ->check(whole_number(1, 65535))
      ->type_name("PORT");
  app.add_option("--coordinator", given.coordinator, "Where --coordinate runs, as it prints it")
      ->check(coordinator())
      ->type_name("HOST:PORT/TOKEN");
  app.add_option(
         "--token", given.token,
         "Keeps other jobs' ranks out; the same on every host. Default: a random one,\n"
         "or with several hosts 'job'")
      ->check(word())
      ->type_name("WORD");
  app.add_option(
         "--state", given.state, "A file from which a coordinator that is started again goes on")
      ->check(not_empty("a file"))
      ->type_name("FILE");
}

/// Throws where the command line has one of these options.
void refuse(
    const CLI::App& app, std::initializer_list<const char*> names, const std::string& rule) {
  for (const char* name : names) {
    if (app.count(name) > 0) throw CLI::ValidationError(std::string(name) + ": " + rule);
  }
}

void check_elastic(const CLI::App& app, const LaunchOptions& options, const Given& given) {
  if (!given.elastic && !given.coordinate) {
    return refuse(
        app,
        {"--min-ranks", "--max-ranks", "--hold", "--lost-after", "--wait", "--coordinator",
         "--token", "--state"},
        "expected --elastic beside it");
  }
  const int all = given.max_ranks.value_or(options.nodes * options.local_ranks);
  if (given.min_ranks.value_or(1) > all) {
    throw CLI::ValidationError(
        "--min-ranks: expected no more than all ranks (" + std::to_string(all) + "), got " +
        std::to_string(*given.min_ranks));
  }
  if (given.lost_after.value_or(10) < 2) {
    throw CLI::ValidationError(
        "--lost-after: expected 2 seconds or more: ranks speak every second");
  }
  if (given.coordinate && !given.max_ranks) {
    throw CLI::ValidationError("--coordinate: expected --max-ranks beside it, for the whole job");
  }
  if (given.coordinate && !given.state.empty() && given.token.empty()) {
    throw CLI::ValidationError(
        "--state: expected --token beside it: members come back to a coordinator that has theirs");
  }
  if (given.coordinate && !given.coordinator.empty()) {
    throw CLI::ValidationError("--coordinate: expected no --coordinator beside it");
  }
}

void check_ranks(const CLI::App& app, const LaunchOptions& options, const Given& given) {
  const bool has_ranks = app.count("--nproc-per-node") > 0;
  if (given.coordinate && (has_ranks || !options.command.empty())) {
    throw CLI::ValidationError(
        "--coordinate: expected no --nproc-per-node and no program beside it");
  }
}

ElasticOptions elastic_of(const LaunchOptions& options, const Given& given) {
  ElasticOptions elastic;
  elastic.max_ranks = given.max_ranks.value_or(options.nodes * options.local_ranks);
  elastic.min_ranks = given.min_ranks.value_or(elastic.max_ranks);
  if (given.lost_after) elastic.lost_after = milliseconds_of(*given.lost_after);
  if (given.wait) elastic.wait = milliseconds_of(*given.wait);
  if (given.hold) elastic.hold = milliseconds_of(*given.hold);
  elastic.coordinator = given.coordinator;
  elastic.coordinate = given.coordinate.value_or(0);
  elastic.token = given.token;
  elastic.state = given.state;
  return elastic;
}

void check_hosts(const CLI::App& app, const LaunchOptions& options, const Given& given) {
  const auto nnodes = "--nnodes " + std::to_string(options.nodes);
  if (given.standalone && options.nodes > 1) {
    throw CLI::ValidationError(
        nnodes + ": expected no --standalone beside it, which means one host");
  }
  if (given.standalone) {
    refuse(
        app, {"--master-addr", "--master-port", "--rdzv-endpoint"},
        "expected no --standalone beside it, which has its own");
  }
  if (given.endpoint && (given.master_addr || given.master_port)) {
    throw CLI::ValidationError(
        "--rdzv-endpoint: expected no --master-addr or --master-port beside it, which it replaces");
  }
  if (options.nodes > 1 && !given.endpoint && given.coordinator.empty() &&
      (!given.master_addr || !given.master_port)) {
    throw CLI::ValidationError(
        nnodes +
        ": expected --rdzv-endpoint, the same on every host, or --master-addr and "
        "--master-port");
  }
  if (options.node_rank >= options.nodes) {
    throw CLI::ValidationError(
        "--node-rank: expected less than --nnodes (" + std::to_string(options.nodes) + "), got " +
        std::to_string(options.node_rank));
  }
}

void check_logs(const LaunchOptions& options, const Given& given) {
  if (given.no_prefix && !options.log_dir.empty()) {
    throw CLI::ValidationError(
        "--log-dir: expected no --no-prefix beside it, with which ranks write past ddprun");
  }
}

LaunchOptions completed(LaunchOptions options, const Given& given) {
  options.prefix = !given.no_prefix;
  options.omp_threads = given.omp_threads;
  if (given.master_addr) options.master_addr = *given.master_addr;
  if (given.master_port) options.master_port = *given.master_port;
  if (given.endpoint) {
    const auto colon = port_separator(*given.endpoint);
    options.master_addr = given.endpoint->substr(0, colon);
    if (options.master_addr.front() == '[' && options.master_addr.back() == ']') {
      options.master_addr = options.master_addr.substr(1, options.master_addr.size() - 2);
    }
    options.master_port = std::stoi(given.endpoint->substr(colon + 1));
  }
  if (given.grace_seconds) options.grace = milliseconds_of(*given.grace_seconds);
  const bool elastic = given.elastic || given.coordinate;
  if (elastic) options.elastic = elastic_of(options, given);
  options.max_restarts = given.max_restarts.value_or(elastic ? kElasticRestarts : 0);
  return options;
}

}  // namespace

ParsedOptions parse_options(
    int argc, const char* const* argv, std::ostream& out, std::ostream& err,
    const Variables& variables) {
  LaunchOptions options;
  Given given;
  CLI::App app(kDescription, "ddprun");
  app.formatter(std::make_shared<HelpFormatter>());
  app.footer(kDetails);
  app.prefix_command();
  app.set_version_flag("--version", "ddprun " DDP_VERSION);
  add_hosts(app, options, given);
  add_ranks(app, given);
  add_attempts(app, options, given);
  add_elastic(app, given);
  try {
    app.parse(argc, argv);
    take_pet_variables(app, options.nodes, variables);
    if (!given.coordinate && app.count("--nproc-per-node") == 0) {
      throw CLI::RequiredError("--nproc-per-node");
    }
    const auto rest = app.remaining();
    if (!given.coordinate || !rest.empty()) options.command = extract_command(rest);
    check_ranks(app, options, given);
    check_elastic(app, options, given);
    check_hosts(app, options, given);
    check_logs(options, given);
  } catch (const CLI::Success& request) {  // --help, --version
    return {std::nullopt, app.exit(request, out, err)};
  } catch (const CLI::ParseError& error) {
    err << "ddprun: " << error.what() << "\nRun ddprun --help for more information.\n";
    return {std::nullopt, kBadUsage};
  }
  return {completed(std::move(options), given), 0};
}

}  // namespace ddp::launch
