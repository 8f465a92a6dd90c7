#include "launch/torchrun_options.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include <ddp/internal/ranges.h>

#include "launch/engine.h"
#include "launch/environment.h"
#include "launch/texts.h"
#include "launch/validators.h"

namespace ddp::launch {
namespace {

constexpr const char* kTorchrunGroup = "Options of torchrun";
constexpr int kMostSecondsToJoin = 86400;

/// mpirun's options of several letters after one hyphen.
constexpr std::pair<const char*, const char*> kOfMpirun[] = {
    {"-np", "--np"},
    {"-host", "--host"},
    {"-hostfile", "--hostfile"},
    {"-machinefile", "--hostfile"},
};

/// Describe torchrun's agents and its Python programs, or what is no choice here.
constexpr const char* kUnused[] = {
    "--role",
    "--start-method",
    "--monitor-interval",
    "--local-addr",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--event-log-handler",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle"};

/// Flags among them.
constexpr const char* kUnusedFlags[] = {"--virtual-local-rank"};

/// "--node_rank=1" becomes "--node-rank=1"; only the name changes.
std::string with_hyphens(std::string word) {
  const auto end = std::min(word.find('='), word.size());
  std::replace(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(end), '_', '-');
  return word;
}

/// A stream for all ranks, or one each: "3", "0:1,1:2".
CLI::Validator streams() {
  const auto check = [](const std::string& text) {
    for (const auto& part : split(text, ',')) {
      const auto colon = part.find(':');
      const bool names_rank =
          colon == std::string::npos || number_in(part.substr(0, colon), 0, kMaxLocalRanks - 1);
      const auto stream = colon == std::string::npos ? part : part.substr(colon + 1);
      if (!names_rank || !number_in(stream, 0, 3)) {
        return "expected 0 to 3, or RANK:0 to RANK:3, got '" + text + "'";
      }
    }
    return std::string();
  };
  return CLI::Validator(check, "");
}

CLI::Validator backend() {
  const auto check = [](const std::string& text) {
    const bool is_known = text == "c10d" || text == "static";
    return is_known ? std::string() : "expected c10d or static, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

/// Reads "KEY=VALUE,KEY=VALUE"; the keys with a meaning here are is_host and join_timeout.
void read_conf(const std::string& conf, LaunchOptions& options, std::vector<std::string>& notes) {
  if (conf.empty()) return;
  for (const auto& part : split(conf, ',')) {
    const auto equals = part.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw CLI::ValidationError("--rdzv-conf: expected KEY=VALUE,KEY=VALUE, got '" + conf + "'");
    }
    const auto key = part.substr(0, equals), value = part.substr(equals + 1);
    const auto is_one_of = [&](std::initializer_list<const char*> words) {
      return contains(words, value);
    };
    if (key == "join_timeout" && hosts_that_agree(options) > 1) {
      const auto seconds = number_in(value, 1, kMostSecondsToJoin);
      if (!seconds) {
        throw CLI::ValidationError(
            "--rdzv-conf: expected join_timeout to be 1 to 86400 (seconds), got '" + part + "'");
      }
      options.join_timeout = std::chrono::seconds(*seconds);
    } else if (key != "is_host" || !options.rendezvous) {
      notes.push_back("--rdzv-conf " + key + " has no meaning here");
    } else if (is_one_of({"1", "true", "True", "yes"})) {
      options.is_first_host = true;
    } else if (is_one_of({"0", "false", "False", "no"})) {
      options.is_first_host = false;
    } else {
      throw CLI::ValidationError(
          "--rdzv-conf: expected is_host=true or is_host=false, got '" + part + "'");
    }
  }
}

void note_streams(
    const TorchrunOptions& torchrun, const LaunchOptions& options,
    std::vector<std::string>& notes) {
  const auto asks = [](const std::string& text) { return !text.empty() && text != "0"; };
  // With a folder, --tee 3 is what ddprun does anyway.
  if (asks(torchrun.tee) && options.log_dir.empty()) {
    notes.push_back("--tee has no meaning here without --log-dir");
  } else if (asks(torchrun.tee) && torchrun.tee != "3") {
    notes.push_back("--tee has no other meaning here than 3: --log-dir keeps both streams");
  }
  if (asks(torchrun.redirects)) {
    notes.push_back(
        "--redirects has no meaning here: the ranks write to ddprun's output, and with --log-dir "
        "to files, too");
  }
}

}  // namespace

std::vector<std::string> with_own_spellings(
    const CLI::App& app, int argc, const char* const* argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  for (size_t i = 0; i < words.size(); ++i) {
    std::string& word = words[i];
    if (word.size() < 2 || word.front() != '-' || word == "--") break;
    for (const auto& [theirs, own] : kOfMpirun) {
      if (word == theirs) word = own;
    }
    const bool is_long = word[1] == '-';
    if (is_long) {
      const auto hyphens = with_hyphens(word);
      const auto name = hyphens.substr(0, hyphens.find('='));
      if (app.get_option_no_throw(name) != nullptr) word = hyphens;
    }
    const auto name = is_long ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const auto* option = app.get_option_no_throw(name);
    if (option == nullptr) break;
    const bool has_value = option->get_items_expected_max() > 0;
    // CLI11 would take the next word, the program's name.
    if (has_value && is_long && word.back() == '=' && name.size() + 1 == word.size()) {
      throw CLI::ValidationError(name + ": expected a value after '=', got nothing");
    }
    if (has_value && name.size() == word.size()) ++i;  // the next word, whatever it begins with
  }
  return words;
}

void add_torchrun_options(CLI::App& app, TorchrunOptions& torchrun) {
  const auto add = [&](const char* names, std::string& value, const char* help, const char* type) {
    return app.add_option(names, value, help)->type_name(type)->group(kTorchrunGroup);
  };
  add("--rdzv-backend", torchrun.backend,
      "With c10d and without --node-rank, hosts get their numbers as they come:\n"
      "the one with the endpoint's address is the first",
      "c10d|static")
      ->check(backend());
  add("--rdzv-id", torchrun.id,
      "The job's name, the same on every host: keeps others out, as --token.\n"
      "Default: the number of the job of SLURM, LSF, PBS or Flux; with --elastic 'job'",
      "ID")
      ->check(word());
  add("--rdzv-conf", torchrun.conf,
      "is_host=true: this is the first host, whatever its addresses;\n"
      "join_timeout=S: hosts wait S seconds for each other [300; in Kubernetes 1800]",
      "KEY=VALUE,...");
  add("-t,--tee", torchrun.tee, "With --log-dir, 3 is what ddprun does; no other has a meaning",
      "STREAMS")
      ->check(streams());
  add("-r,--redirects", torchrun.redirects, "No meaning; --log-dir has both streams", "STREAMS")
      ->check(streams());
  app.add_flag("--no-python", torchrun.no_python, "Always so; the program is started as it is")
      ->group(kTorchrunGroup);
  for (const char* name : kUnused) {
    app.add_option_function<std::string>(
           name, [&torchrun, name](const std::string&) { torchrun.unused.emplace_back(name); },
           "No meaning")
        ->type_name("VALUE")
        ->group(kTorchrunGroup);
  }
  for (const char* name : kUnusedFlags) {
    const auto note = [&torchrun, name](int64_t) { torchrun.unused.emplace_back(name); };
    app.add_flag_function(name, note, "No meaning")->group(kTorchrunGroup);
  }
}

std::vector<std::string> apply_torchrun_options(
    const CLI::App& app, const TorchrunOptions& torchrun, const Variables& variables,
    LaunchOptions& options) {
  std::vector<std::string> notes;
  for (const auto& name : torchrun.unused) notes.push_back(name + " has no meaning here");
  note_streams(torchrun, options, notes);
  const bool is_numbered = app.count("--node-rank") > 0 || options.hosts;
  if (torchrun.backend == "c10d" && options.nodes > 1 && !is_numbered) {
    options.rendezvous = true;
    options.node_rank = -1;
  }
  options.join_timeout = default_join_timeout(variables);
  read_conf(torchrun.conf, options, notes);
  // A host of an elastic job may come from another job of the engine.
  const bool has_engines_id = hosts_that_agree(options) > 1 && !options.elastic && !options.hosts;
  if (torchrun.id.empty() && has_engines_id) options.job_id = job_of_engine(variables);
  if (torchrun.id.empty()) return notes;
  if (app.count("--token") > 0) {
    throw CLI::ValidationError("--rdzv-id: expected no --token beside it, which is the same");
  }
  options.job_id = torchrun.id;
  if (hosts_that_agree(options) == 1 && !options.elastic) {
    notes.push_back("--rdzv-id has no meaning here: nobody else is let in");
  }
  return notes;
}

void set_ranks(const std::string& text, LaunchOptions& options) {
  const auto of_host = [](int count, const char* what, const std::string& word) {
    if (count >= 1) return std::min(count, kMaxLocalRanks);
    throw CLI::ValidationError(
        "--nproc-per-node: expected " + std::string(what) + " on this host, got " + word +
        ". Say a number.");
  };
  const auto gpus = [] {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return usable_gpus(
        "/dev", visible != nullptr ? std::optional<std::string>(visible) : std::nullopt);
  };
  if (text == "cpu" || (text == "auto" && gpus() == 0)) {
    options.local_ranks = of_host(usable_cores(), "a core", text);
  } else if (text == "gpu" || text == "auto") {
    options.local_ranks = of_host(gpus(), "a GPU", text);
  } else {
    options.ranks_of_nodes.clear();
    for (const auto& part : split(text, ',')) options.ranks_of_nodes.push_back(std::stoi(part));
    options.local_ranks = options.ranks_of_nodes.front();
    if (options.ranks_of_nodes.size() == 1) options.ranks_of_nodes.clear();
  }
}

std::optional<int> set_nodes(const std::string& text, LaunchOptions& options) {
  const auto parts = split(text, ':');
  options.nodes = std::stoi(parts.back());
  const int least = std::stoi(parts.front());
  return least < options.nodes ? std::optional<int>(least) : std::nullopt;
}

}  // namespace ddp::launch
