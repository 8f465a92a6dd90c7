#include "launch/hosts/remote_command.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string_view>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr std::string_view kPort = "ddprun-port ";
constexpr std::string_view kPlain =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@+=:,./-";

std::string seconds_of(std::chrono::milliseconds time) {
  return str(static_cast<double>(time.count()) / 1000);
}

void add_elastic(const ElasticOptions& elastic, std::vector<std::string>& words) {
  words.insert(
      words.end(), {"--elastic", "--min-ranks", str(elastic.min_ranks), "--max-ranks",
                    str(elastic.max_ranks), "--lost-after", seconds_of(elastic.lost_after),
                    "--wait", seconds_of(elastic.wait), "--hold", seconds_of(elastic.hold)});
}

}  // namespace

std::string quoted(const std::string& text) {
  // zsh replaces a word that begins with "=".
  const bool is_plain =
      !text.empty() && text.front() != '=' && text.find_first_not_of(kPlain) == std::string::npos;
  if (is_plain) return text;
  std::string result = "'";
  for (const char one : text) {
    if (one == '\'') {
      result += "'\\''";
    } else {
      result += one;
    }
  }
  return result + "'";
}

Environment passed_on(const Environment& all, const std::vector<std::string>& more) {
  const auto is_passed = [&](const std::string& entry) {
    const auto name = entry.substr(0, entry.find('='));
    if (contains(more, name)) return true;
    if (name == "DDP_COORDINATOR" || name == "DDP_SLOT") return false;
    if (name == "PATH" || name == "LD_LIBRARY_PATH" || name == "OMP_NUM_THREADS") return true;
    for (const auto prefix : {"DDP_", "TORCH_", "NCCL_", "GLOO_"}) {
      if (begins_with(name, prefix)) return true;
    }
    return false;
  };
  Environment result;
  std::copy_if(all.begin(), all.end(), std::back_inserter(result), is_passed);
  // A later one replaces an earlier one.
  const auto has_value = [](const std::string& entry) { return entry.find('=') < entry.size(); };
  std::copy_if(more.begin(), more.end(), std::back_inserter(result), has_value);
  return result;
}

std::vector<std::string> host_arguments(const LaunchOptions& options, int node, int port) {
  const bool is_ipv6 = options.master_addr.find(':') != std::string::npos;
  const auto address = is_ipv6 ? "[" + options.master_addr + "]" : options.master_addr;
  std::vector<std::string> words = {"--obey-stdin", "-n"};
  if (options.nodes > 1) {
    words.insert(
        words.end(), {joined_by(",", options.ranks_of_nodes), "--nnodes", str(options.nodes),
                      "--node-rank", str(node), "--rdzv-endpoint", str(address, ":", port)});
  } else {
    words.push_back(str(options.local_ranks));
    if (port > 0) words.insert(words.end(), {"--master-port", str(port)});
  }
  const auto add = [&](const std::string& name, const std::string& value) {
    words.insert(words.end(), {name, value});
  };
  if (options.omp_threads) add("--omp-threads", str(*options.omp_threads));
  if (options.grace) add("--grace", seconds_of(*options.grace));
  if (options.elastic) add_elastic(*options.elastic, words);
  if (options.elastic || options.max_restarts > 0) add("--max-restarts", str(options.max_restarts));
  if (hosts_that_agree(options) > 1) {
    add("--rdzv-id", options.job_id);
    add("--rdzv-conf", str("join_timeout=", options.join_timeout.count()));
  }
  if (!options.log_dir.empty()) add("--log-dir", options.log_dir);
  if (!options.prefix) words.push_back("--no-prefix");
  words.push_back("--");
  words.insert(words.end(), options.command.begin(), options.command.end());
  return words;
}

std::string remote_command(
    const std::string& folder, const Environment& environment, const std::string& ddprun,
    const std::vector<std::string>& arguments) {
  auto line = "cd " + quoted(folder) + " && exec env";
  for (const auto& variable : environment) line += " " + quoted(variable);
  line += " " + quoted(ddprun);
  for (const auto& argument : arguments) line += " " + quoted(argument);
  return line;
}

std::string port_line(int port) { return str(kPort, port, "\n"); }

int port_of_line(const std::string& line) {
  if (!begins_with(line, kPort)) return 0;
  // A terminal ends lines with "\r\n".
  const auto end = line.find_first_of("\r\n");
  return number_in(line.substr(kPort.size(), end - kPort.size()), 1, 65535).value_or(0);
}

}  // namespace ddp::launch
