// Which clients a job takes and which lines of them, and the numbers of hosts.
#include <algorithm>

#include <ddp/internal/membership/lines.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/engine.h"
#include "launch/environment.h"
#include "launch/job/job.h"

namespace ddp::launch {

using membership::Back;
using membership::Hello;

namespace {

std::string first_word(const std::string& line) { return line.substr(0, line.find(' ')); }

struct Introduction {
  std::string token;
  int slot = -1;
};

/// Nothing: the line goes on with what came before.
std::optional<Introduction> introduction_of(const MemberMessage& message) {
  if (const auto* hello = std::get_if<Hello>(&message))
    return Introduction{hello->token, hello->slot};
  if (const auto* back = std::get_if<Back>(&message)) return Introduction{back->token, back->slot};
  return std::nullopt;
}

}  // namespace

/// A client is what its first line says, a launcher or a member, until its connection ends. A
/// launcher's lines of other words mean nothing. A line that its client cannot send ends the
/// connection, and the lines after it, which were read already, are dropped.
void Job::on_line(Time now, Client client, const std::string& line) {
  now_ = now;
  if (closed_.count(client) > 0) return;
  if (is_launcher(client)) return take_from_launcher(client, line);
  const bool is_member = members_.count(client) > 0;
  if (first_word(line) == "host" && !is_member) return admit(client, line);
  const auto message = membership::message_of<MemberMessage>(line);
  if (!message || !membership_) return close(client);
  const auto introduced = introduction_of(*message);
  if (introduced ? introduced->token != token_ : !is_member) return close(client);
  if (state_ == State::Draining || state_ == State::Over) {
    wires_.send(
        client, membership::line_of(CoordinatorMessage(membership::End{0, {"the job is done"}})));
    return close(client);
  }
  members_.insert(client);
  membership_->on_message(now, client, *message);
  if (introduced) ask_to_leave(introduced->slot);
  apply_orders();
}

/// A process that was started, and had not said hello yet when its host was told to leave.
void Job::ask_to_leave(int slot) {
  // Else it is of a host that came back, whose launcher's line about it is not read yet.
  const bool runs_there =
      any_of(launchers_, [&](const auto& entry) { return entry.second.running.count(slot) > 0; });
  if (leaving_.count(slot) > 0 && runs_there) membership_->on_leave_wanted(now_, slot);
}

void Job::close(Client client) {
  closed_.insert(client);
  wires_.close(client);
}

void Job::admit(Client client, const std::string& line) {
  InputText words(line);
  std::string word, token;
  Launcher launcher;
  bool elastic = false;
  int nodes = 0, restarts = 0, held = 0;
  words >> word >> token >> elastic >> launcher.node >> nodes >> launcher.ranks >> restarts >> held;
  if (!words) return close(client);
  if (!is_same_job(token_, token)) return refuse_other_job(client, token, held == 0);
  const bool comes_late = state_ == State::Draining && held == 0;
  if (comes_late || state_ == State::Over) {
    launchers_[client] = launcher;
    return wires_.send(client, str("finish ", exit_code_.value_or(code_), " 0 "));
  }
  const auto why = reason_to_refuse(launcher, elastic, nodes, restarts);
  if (!why.empty()) {
    wires_.send(client, str("finish 1 0 ", why));
    return close(client);
  }
  const bool is_node = launcher.node >= 0 && (elastic || launcher.node < options_.nodes);
  if (!is_node && !options_.rendezvous) return close(client);
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
  close(client);
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
