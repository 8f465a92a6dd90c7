#include "launch/hosts/host_options.h"

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>

#include "launch/hosts/host_list.h"
#include "launch/texts.h"
#include "launch/validators.h"

namespace ddp::launch {
namespace {

constexpr const char* kHostsGroup = "Options of mpirun, to start ddprun on other hosts";
// -tt: when the client ends, the host's ddprun gets SIGHUP. Without ERROR, each client says that
// its connection is closed.
constexpr const char* kSsh = "ssh -tt -o LogLevel=ERROR";

std::string text_of_file(const std::string& path) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) {
    throw CLI::ValidationError("--hostfile: expected a file that can be read, got '" + path + "'");
  }
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  InputText input(text);
  for (std::string word; input >> word;) words.push_back(word);
  return words;
}

void refuse_beside(const CLI::App& app, const std::string& option) {
  for (const char* name :
       {"--nnodes", "--node-rank", "--standalone", "--coordinate", "--coordinator", "--state"}) {
    if (app.count(name) == 0) continue;
    throw CLI::ValidationError(
        option + ": expected no " + name + " beside it, for it has the hosts");
  }
}

/// \throws CLI::ValidationError  when it is neither NAME=VALUE nor the name of one that is set.
void check_variable(const std::string& text) {
  const auto name = text.substr(0, text.find('='));
  const bool is_name = !name.empty() && !std::isdigit(static_cast<unsigned char>(name.front())) &&
                       all_of(name, [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  if (!is_name) throw CLI::ValidationError("-x: expected NAME or NAME=VALUE, got '" + text + "'");
  if (name.size() == text.size() && std::getenv(name.c_str()) == nullptr) {
    throw CLI::ValidationError("-x: expected a variable that is set, got '" + text + "'");
  }
}

void set_hosts(const CLI::App& app, const GivenHosts& given, int ranks, LaunchOptions& options) {
  const std::string name = given.list.empty() ? "--hostfile" : "-H";
  if (!given.list.empty() && !given.file.empty()) {
    throw CLI::ValidationError("-H: expected no --hostfile beside it");
  }
  refuse_beside(app, name);
  HostsOptions hosts;
  hosts.rsh = words_of(given.rsh.empty() ? kSsh : given.rsh);
  if (hosts.rsh.empty()) throw CLI::ValidationError("--rsh: expected a program, got spaces");
  hosts.variables = given.variables;
  for (const auto& variable : given.variables) check_variable(variable);
  options.ranks_of_nodes.clear();
  try {
    const auto listed =
        given.list.empty() ? hosts_of_file(text_of_file(given.file)) : hosts_of_list(given.list);
    for (const auto& host : with_ranks(listed, ranks, given.all.value_or(0))) {
      hosts.names.push_back(host.name);
      options.ranks_of_nodes.push_back(host.ranks);
    }
    const bool is_given = app.count("--master-addr") + app.count("--rdzv-endpoint") > 0;
    if (!is_given) options.master_addr = address_of_first(hosts.names, host_name());
  } catch (const std::invalid_argument& error) {
    throw CLI::ValidationError(name + ": " + error.what());
  }
  options.nodes = static_cast<int>(hosts.names.size());
  options.local_ranks = options.ranks_of_nodes.front();
  options.hosts = std::move(hosts);
}

}  // namespace

void add_host_options(CLI::App& app, GivenHosts& given, LaunchOptions& options) {
  app.add_option(
         "-H,--host", given.list,
         "Start a ddprun by ssh on each of these hosts, with so many ranks; user@HOST, too")
      ->check(not_empty("hosts"))
      ->type_name("HOST:RANKS,...")
      ->group(kHostsGroup);
  app.add_option(
         "--hostfile", given.file,
         "The same from a file, with lines 'HOST slots=RANKS' or HOST:RANKS")
      ->check(not_empty("a file"))
      ->type_name("FILE")
      ->group(kHostsGroup);
  app.add_option(
         "--np", given.all,
         "As -np: ranks of the whole job, which fill the hosts in their order.\nDefault: all that "
         "they have. Without hosts the same as -n")
      ->check(whole_number(1, kMaxLocalRanks * kMaxNodes))
      ->type_name("N")
      ->group(kHostsGroup);
  app.add_option(
         "-x", given.variables,
         "Pass this variable on, or this value, beside PATH, LD_LIBRARY_PATH,\nOMP_NUM_THREADS, "
         "DDP_*, TORCH_*, NCCL_* and GLOO_*. More than one: -x A -x B")
      ->allow_extra_args(false)
      ->check(not_empty("a variable's name"))
      ->type_name("NAME[=VALUE]")
      ->group(kHostsGroup);
  app.add_option(
         "--rsh", given.rsh,
         "Called as PROGRAM HOST COMMAND in place of ssh; may have arguments: 'ssh -tt -p 2222'")
      ->check(not_empty("a program"))
      ->type_name("PROGRAM")
      ->group(kHostsGroup);
  // As -H's ddprun calls that of a host.
  app.add_flag("--obey-stdin", options.obeys_stdin, "")->group("");
}

void apply_host_options(
    const CLI::App& app, const GivenHosts& given, int ranks, LaunchOptions& options) {
  if (!given.list.empty() || !given.file.empty()) {
    return set_hosts(app, given, ranks, options);
  }
  for (const char* name : {"--rsh", "-x"}) {
    if (app.count(name) == 0) continue;
    throw CLI::ValidationError(std::string(name) + ": expected -H or --hostfile beside it");
  }
  if (!given.all) return;
  if (ranks > 0) {
    throw CLI::ValidationError("--np: expected no --nproc-per-node beside it without -H");
  }
  if (options.nodes > 1 || *given.all > kMaxLocalRanks) {
    throw CLI::ValidationError(
        str("--np: expected at most ", kMaxLocalRanks, " on one host, or -H, got ", *given.all,
            " and --nnodes ", options.nodes, ". --nproc-per-node are the ranks of each host."));
  }
  options.local_ranks = *given.all;
}

}  // namespace ddp::launch
