// Which hosts a job takes, and their numbers.
#include <algorithm>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/engine.h"
#include "launch/environment.h"
#include "launch/job/job.h"

namespace ddp::launch {

void Job::admit(Client client, const std::string& line) {
  InputText words(line);
  std::string word, token;
  Launcher launcher;
  bool elastic = false;
  int nodes = 0, restarts = 0, held = 0;
  words >> word >> token >> elastic >> launcher.node >> nodes >> launcher.ranks >> restarts >> held;
  if (!words) return wires_.close(client);
  if (!is_same_job(token_, token)) return refuse_other_job(client, token, held == 0);
  const bool comes_late = state_ == State::Draining && held == 0;
  if (comes_late || state_ == State::Over) {
    launchers_[client] = launcher;
    return wires_.send(client, str("finish ", exit_code_.value_or(code_), " 0 "));
  }
  const auto why = reason_to_refuse(launcher, elastic, nodes, restarts);
  if (!why.empty()) {
    wires_.send(client, str("finish 1 0 ", why));
    return wires_.close(client);
  }
  const bool is_node = launcher.node >= 0 && (elastic || launcher.node < options_.nodes);
  if (!is_node && !options_.rendezvous) return wires_.close(client);
  if (state_ != State::Joining && launcher.node < 0) launcher.node = free_node();
  launchers_[client] = launcher;
  wires_.watch(client);
  ++seen_launchers_;
  count_launchers();
  if (held > 0) lost_launchers_ = std::max(0, lost_launchers_ - 1);
  if (state_ == State::Joining) {
    if (static_cast<int>(launchers_.size()) < options_.nodes) return;
    state_ = State::Training;
    number_hosts();
    return begin_attempts();
  }
  if (state_ == State::Training && held == 0) begin_attempt(client);
}

/// The text does not name this job's id, which keeps others out.
///
/// \param is_new  whether nothing runs there yet. Else the launcher tries again until its own job's
///        coordinator is back.
void Job::refuse_other_job(Client client, const std::string& id, bool is_new) {
  constexpr size_t kMostIds = 4, kLongestId = 64;
  const bool is_plain =
      id.size() <= kLongestId && all_of(id, [](char c) { return ' ' < c && c < 127; });
  if (is_new) {
    if (is_plain && refused_ids_.size() < kMostIds) refused_ids_.insert(id);
    wires_.send(
        client, str("finish 1 0 --rdzv-id: expected that of the job at this endpoint, or its "
                    "--token, got '",
                    id, "'. Give all hosts of a job the same; two jobs need two ports."));
  }
  wires_.close(client);
}

/// Why a launcher cannot take part; "": it can.
std::string Job::reason_to_refuse(
    const Launcher& launcher, bool elastic, int nodes, int restarts) const {
  if (elastic != options_.elastic.has_value()) {
    return "--elastic: expected it on all hosts, or on none";
  }
  if (launcher.node < 0) {
    const auto why = reason_without_place(launcher);
    if (!why.empty()) return why;
  }
  if (elastic) return "";  // a coordinator that runs alone has no --nproc-per-node to compare
  const int wanted = hosts_that_agree(options_);
  const bool is_listed = launcher.node >= 0 && launcher.node < options_.nodes;
  const int ranks = is_listed ? ranks_of_node(options_, launcher.node) : options_.local_ranks;
  const bool may_differ = options_.rendezvous;
  if (nodes != wanted || (launcher.ranks != ranks && !may_differ) ||
      restarts != options_.max_restarts) {
    return str(
        "expected node 0's --nnodes ", wanted, ", --nproc-per-node ", ranks, " and --max-restarts ",
        options_.max_restarts, ", got ", nodes, ", ", launcher.ranks, " and ", restarts);
  }
  const bool is_taken = any_of(launchers_, [&](const auto& entry) {
    return entry.second.node == launcher.node && launcher.node >= 0;
  });
  if (is_taken) {
    return str("--node-rank: expected one host with each, got a second one with ", launcher.node);
  }
  return "";
}

/// Why a launcher without a number gets none; "": it does.
std::string Job::reason_without_place(const Launcher& launcher) const {
  if (!options_.rendezvous) {
    return "--node-rank: expected it on all hosts, or --rdzv-backend c10d on node 0, too";
  }
  if (state_ == State::Joining) return "";
  // The ranks of an elastic job's hosts have their places before all hosts are there.
  if (options_.elastic && launcher.ranks != options_.local_ranks) {
    return str(
        "--nproc-per-node: expected node 0's ", options_.local_ranks, ", got ", launcher.ranks);
  }
  const bool has_place = options_.elastic && free_node() < options_.nodes;
  return has_place ? "" : str("--nnodes: expected ", options_.nodes, " hosts, got another one");
}

/// The lowest number that no host has.
int Job::free_node() const {
  int node = 0;
  const auto has_it = [&](const auto& entry) { return entry.second.node == node; };
  while (any_of(launchers_, has_it)) ++node;
  return node;
}

/// In the order in which they came, this process's own first.
void Job::number_hosts() {
  if (!options_.rendezvous) return;
  options_.ranks_of_nodes.clear();
  for (auto& [client, launcher] : launchers_) {
    launcher.node = static_cast<int>(options_.ranks_of_nodes.size());
    options_.ranks_of_nodes.push_back(launcher.ranks);
  }
}

}  // namespace ddp::launch
