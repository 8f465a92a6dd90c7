#include "launch/options.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include <CLI/CLI.hpp>

#include <ddp/internal/ranges.h>

#include "launch/engine.h"
#include "launch/environment.h"
#include "launch/hosts/host_options.h"
#include "launch/pretend/options.h"
#include "launch/texts.h"
#include "launch/torchrun_options.h"
#include "launch/validators.h"

namespace ddp::launch {
namespace {

constexpr int kMaxRestarts = 1000000;
constexpr int kElasticRestarts = 10;
constexpr int kPortOfTorchrun = 29400;  // of an endpoint without one

constexpr const char* kDescription =
    "Runs one program as the ranks of a distributed job and ends them together.";

constexpr const char* kDetails = R"(
Each rank finds in its environment RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK,
GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, OMP_NUM_THREADS, TORCHELASTIC_RESTART_COUNT and
TORCHELASTIC_MAX_RESTARTS, as under torchrun.
torchrun's options may have underscores: --nproc_per_node.
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
code 143 (ddp::PreemptionNotice), or that die by that signal, are not started again.
Without --nnodes ddprun makes a world of its own ranks, and says where others were started beside it.
Nothing that a rank started outlives the job, even when ddprun itself is killed.

With --pretend each rank answers its own collectives, writes a list of its calls, and ddprun reports
memory, calls and time of a step; 1 is the exit code where the calls of the ranks would not meet.

Options that are not given are taken from PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK,
PET_RDZV_ENDPOINT, PET_RDZV_BACKEND, PET_RDZV_ID, PET_RDZV_CONF, PET_MASTER_ADDR, PET_MASTER_PORT,
PET_MAX_RESTARTS and PET_LOG_DIR, as by torchrun; Kubeflow sets them.

Exit code: 0 when every rank exited with 0; 2 bad usage; 126 the program cannot be executed;
127 it was not found; 141 nobody reads ddprun's output any more; else as above.

Examples:
  ddprun -n 2 ./train --epochs 6
  ddprun -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29500 ./train
  ddprun -H host0:8,host1:8 ./train
  ddprun -n 8 --max-restarts 3 --log-dir logs ./train --checkpoint runs/a --resume
  ddprun --pretend 1024 --ranks 0,512 --link 50GB/s --intra 400GB/s ./train
)";

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
  if (rest.front().empty()) throw CLI::ValidationError("expected a program's name, got ''");
  return rest;
}

/// Throws where what CLI11 left over begins with an option.
void check_unknown(const std::vector<std::string>& rest) {
  const std::string program = rest.empty() || rest.front() == "--" ? "" : rest.front();
  if (!program.empty() && program.front() == '-') {
    const bool is_module = program == "-m" || program == "--module";
    const bool is_script = program == "--run-path" || program == "--run_path";
    throw CLI::ValidationError(
        "unknown option '" + program + "'; " +
        (is_module   ? "ddprun starts programs: python -m MODULE"
         : is_script ? "ddprun starts programs: python SCRIPT"
                     : "a program of that name goes after --"));
  }
}

/// Records which options the command line gave, where LaunchOptions cannot show it.
struct Given {
  std::string ranks, nodes;  // empty: not given
  std::optional<int> min_nodes;
  GivenHosts hosts;
  TorchrunOptions torchrun;
  GivenPretended pretended;
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
  app.add_option(
         "-n,--nproc-per-node", given.ranks,
         "Ranks to run on this host; where hosts differ, those of each: 4,2.\n"
         "gpu: one for each GPU of this host; cpu: for each core; auto: GPUs, or else cores")
      ->check(rank_counts())
      ->type_name("RANKS");
  app.add_flag(
      "--standalone", given.standalone,
      "One host, on a free port that ddprun reserves (the default), also where others run beside "
      "it");
  app.add_option(
         "--nnodes", given.nodes,
         "Hosts in the job. Default: 1. MIN:MAX with --elastic: begin with MIN, and let others "
         "join")
      ->check(host_counts())
      ->type_name("N");
  app.add_option("--node-rank", options.node_rank, "Which of them this is. Default: 0")
      ->check(whole_number(0, kMaxNodes - 1))
      ->type_name("R");
  app.add_option(
         "--master-addr", given.master_addr,
         "Rank 0's host, as all hosts reach it. Default: 127.0.0.1, or ::1 without IPv4")
      ->check(host())
      ->type_name("HOST");
  app.add_option(
         "--master-port", given.master_port,
         "Rank 0's port. Default with one host: ddprun reserves one")
      ->check(whole_number(1, 65535))
      ->type_name("PORT");
  app.add_option(
         "--rdzv-endpoint", given.endpoint,
         "--master-addr and --master-port in one, as torchrun has it; "
         "with --rdzv-backend c10d\nthe default port is 29400")
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
  const int all = given.max_ranks.value_or(world_size(options));
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
  elastic.max_ranks = given.max_ranks.value_or(world_size(options));
  elastic.min_ranks = given.min_ranks.value_or(elastic.max_ranks);
  if (given.min_nodes) {
    elastic.min_ranks = given.min_ranks.value_or(*given.min_nodes * options.local_ranks);
    elastic.first_ranks = elastic.min_ranks;
  }
  if (given.lost_after) elastic.lost_after = milliseconds_of(*given.lost_after);
  if (given.wait) elastic.wait = milliseconds_of(*given.wait);
  if (given.hold) elastic.hold = milliseconds_of(*given.hold);
  elastic.coordinator = given.coordinator;
  elastic.coordinate = given.coordinate.value_or(0);
  elastic.token = given.token;
  elastic.state = given.state;
  return elastic;
}

/// Port 0, a free one, is of use where no other host has to know it. Without c10d torchrun takes no
/// endpoint without a port either.
void check_endpoint(const LaunchOptions& options, const Given& given) {
  if (!given.endpoint || options.obeys_stdin) return;
  const auto port = endpoint_of(*given.endpoint)->port;
  const bool is_c10d = given.torchrun.backend == "c10d";
  const bool is_free = port == 0 && is_c10d && options.nodes == 1;
  if (port ? *port > 0 || is_free : is_c10d) return;
  throw CLI::ValidationError(
      "--rdzv-endpoint: expected HOST:PORT with a port from 1 to 65535, got '" + *given.endpoint +
      "'");
}

void check_counts(const LaunchOptions& options, const Given& given) {
  if (given.min_nodes && !given.elastic) {
    throw CLI::ValidationError(
        "--nnodes: expected --elastic beside MIN:MAX, for programs that train by ddp::Elastic, got "
        "'" +
        given.nodes + "'. With one number and --max-restarts all hosts start again together.");
  }
  const auto hosts = options.ranks_of_nodes.size();
  if (hosts > 1 && given.min_nodes) {
    throw CLI::ValidationError(
        "--nproc-per-node: expected one number beside --nnodes MIN:MAX, got '" + given.ranks + "'");
  }
  if (hosts == 0 || static_cast<int>(hosts) == options.nodes) return;
  throw CLI::ValidationError(
      "--nproc-per-node: expected one number, or one for each of --nnodes (" +
      std::to_string(options.nodes) + "), got '" + given.ranks + "'");
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
  if (options.nodes > 1 && !options.hosts && !given.endpoint && given.coordinator.empty() &&
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

bool names_ranks(const CLI::App& app) {
  for (const char* name : {"--nproc-per-node", "--np", "--host", "--hostfile"}) {
    if (app.count(name) > 0) return true;
  }
  return false;
}

/// Counts hosts and their ranks.
void read_counts(const CLI::App& app, LaunchOptions& options, Given& given) {
  if (!given.nodes.empty()) given.min_nodes = set_nodes(given.nodes, options);
  const bool has_hosts = app.count("--host") + app.count("--hostfile") > 0;
  if (!given.ranks.empty() && has_hosts && !number_in(given.ranks, 1, kMaxLocalRanks)) {
    throw CLI::ValidationError(
        "--nproc-per-node: expected one number beside -H or --hostfile, got '" + given.ranks + "'");
  }
  if (given.pretended.size) return;
  if (!given.ranks.empty()) set_ranks(given.ranks, options);
  const int ranks = given.ranks.empty() ? 0 : options.local_ranks;
  apply_host_options(app, given.hosts, ranks, options);
  check_counts(options, given);
}

/// Whether one host is meant by default: no option and no variable says how many there are.
bool may_have_others(
    const LaunchOptions& options, const Given& given, const Variables& variables,
    const std::vector<TakenVariable>& taken) {
  const char* standalone = variables ? variables("PET_STANDALONE") : nullptr;
  const bool is_standalone =
      given.standalone || (standalone != nullptr && standalone == std::string("1"));
  const bool is_told = !given.nodes.empty() || options.hosts || options.obeys_stdin ||
                       given.coordinate || !given.coordinator.empty() ||
                       any_of(taken, [](const auto& one) { return one.is_about_hosts; });
  return !is_standalone && !is_told;
}

LaunchOptions completed(LaunchOptions options, const Given& given) {
  options.prefix = !given.no_prefix;
  options.local_ranks = ranks_of_node(options, options.node_rank);
  options.omp_threads = given.omp_threads;
  if (given.master_addr) options.master_addr = without_brackets(*given.master_addr);
  if (given.master_port) options.master_port = *given.master_port;
  if (given.endpoint) {
    const auto endpoint = *endpoint_of(*given.endpoint);
    options.master_addr = endpoint.host;
    options.master_port = endpoint.port.value_or(options.nodes > 1 ? kPortOfTorchrun : 0);
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
  add_torchrun_options(app, given.torchrun);
  add_host_options(app, given.hosts, options);
  add_pretend_options(app, given.pretended, options);
  std::vector<std::string> notes;
  std::vector<TakenVariable> taken;
  try {
    auto words = with_own_spellings(app, argc, argv);
    std::reverse(words.begin(), words.end());  // as CLI11 takes a vector
    app.parse(std::move(words));
    check_unknown(app.remaining());
    const bool is_real = !needs_no_ranks(options, given.pretended);
    if (is_real) taken = take_pet_variables(app, given.nodes, variables);
    if (is_real && !given.coordinate && !names_ranks(app)) {
      throw CLI::RequiredError("--nproc-per-node");
    }
    const auto rest = app.remaining();
    const bool may_lack_program = given.coordinate || !options.calls.check.empty();
    if (!may_lack_program || !rest.empty()) options.command = extract_command(rest);
    read_counts(app, options, given);
    check_ranks(app, options, given);
    check_elastic(app, options, given);
    check_hosts(app, options, given);
    check_endpoint(options, given);
    check_logs(options, given);
    options = completed(std::move(options), given);
    apply_pretend_options(app, given.pretended, given.ranks, options);
    notes = apply_torchrun_options(app, given.torchrun, variables, options);
    const bool may_have = may_have_others(options, given, variables, taken);
    if (auto note = note_of_others(variables); is_real && may_have && !note.empty())
      notes.push_back(note);
  } catch (const CLI::Success& request) {  // --help, --version
    return {std::nullopt, app.exit(request, out, err)};
  } catch (const CLI::ParseError& error) {
    err << "ddprun: " << with_variables(error.what(), taken)
        << "\nRun ddprun --help for more information.\n";
    return {std::nullopt, kBadUsage};
  }
  for (const auto& note : notes) err << "ddprun: " << with_variables(note, taken) << "\n";
  return {std::move(options), 0};
}

}  // namespace ddp::launch
