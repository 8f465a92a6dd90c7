#include "differential/lists.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>

#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/rank_list.h>
#include <ddp/internal/text.h>

#include "differential/plan.h"
#include "launch/pretend/call_words.h"
#include "launch/pretend/meetings.h"
#include "launch/pretend/order_check.h"
#include "support/taken_port.h"
#include "support/temporary_folder.h"

namespace ddp::differential {
namespace {

using launch::CallList;
using launch::ListedCall;
using testing::TemporaryFolder;

constexpr unsigned kSeconds = 20;  // then a rank hangs

/// Ranks of one run, each a process that writes its list.
class ListedRun {
 public:
  /// \param pretended  the present ranks; empty: all of a real job.
  ListedRun(const Program& program, const TemporaryFolder& folder, std::vector<int> pretended)
      : program_(program), folder_(folder), size_(ranks_of(program, 0)), present_(pretended) {
    if (!present_.empty()) return;
    present_.resize(static_cast<size_t>(size_));
    std::iota(present_.begin(), present_.end(), 0);
    is_real_ = true;
  }

  /// \return  what went wrong.
  Outcome run() {
    const int port = testing::free_port();
    std::map<int, pid_t> processes;
    for (const int rank : present_) {
      const auto pid = ::fork();
      if (pid < 0) throw std::runtime_error("differential: no process");
      if (pid == 0) be(rank, port);
      processes[rank] = pid;
    }
    Outcome outcome;
    for (const auto& [rank, pid] : processes) {
      int status = 0;
      ::waitpid(pid, &status, 0);
      if (status == 0) continue;
      const bool hangs = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
      const auto why = WIFSIGNALED(status) ? std::string(::strsignal(WTERMSIG(status)))
                                           : testing::read_bytes(file(rank, ".error"));
      if (outcome.kind.empty() || outcome.kind == "hang") outcome.kind = hangs ? "hang" : "lists";
      outcome.text += ddp::str("\n  ", name_of(rank), ": ", why.substr(0, 1000));
    }
    return outcome;
  }

  CallList list(int rank) const {
    const auto path = file(rank, ".calls");
    return launch::parse_call_list(path, testing::read_bytes(path));
  }
  std::string name_of(int rank) const {
    return ddp::str(is_real_ ? "" : "pretended ", "rank ", rank);
  }

 private:
  std::string file(int rank, const char* ending) const {
    return folder_.file(ddp::str("rank_", rank, ending));
  }

  [[noreturn]] void be(int rank, int port) const {
    ::alarm(kSeconds);
    const auto set = [](const char* name, const std::string& value) {
      ::setenv(name, value.c_str(), /*overwrite=*/1);
    };
    for (const auto* name : {"RANK", "LOCAL_RANK"}) set(name, std::to_string(rank));
    for (const auto* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) set(name, std::to_string(size_));
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(port));
    set("DDP_CALLS_DIR", folder_.path());
    if (!is_real_) set("DDP_PRETEND", joined_by(",", present_));
    const auto error = run_as_process(program_, folder_.file("checkpoint"));
    if (!error.empty()) std::ofstream(file(rank, ".error")) << error;
    delete CallLog::active();  // as exit() ends it, which would remove the parent's files
    ::_exit(error.empty() ? 0 : 1);
  }

  const Program& program_;
  const TemporaryFolder& folder_;
  const int size_;
  std::vector<int> present_;
  bool is_real_ = false;
};

/// Ranks that are pretended together: those that exchange messages.
std::vector<std::vector<int>> present_sets(const Program& program) {
  const auto axes = axes_of(program, 0);
  const int replicas = axes.dp * axes.tp, size = axes.pp * replicas;
  std::vector<std::vector<int>> sets;
  if (program.is("collective", "messages")) {  // the program's own receive of others
    sets.emplace_back(static_cast<size_t>(size));
    std::iota(sets[0].begin(), sets[0].end(), 0);
    return sets;
  }
  for (int place = 0; place < replicas; ++place) {
    auto& set = sets.emplace_back();
    for (int stage = 0; stage < axes.pp; ++stage) set.push_back(stage * replicas + place);
  }
  return sets;
}

std::string group_line(const launch::ListedGroup& group) {
  return launch::group_text(group.name, group.axis, group.ranks);
}
/// Without its step: whether one has begun depends on gradients, and so on other ranks'.
std::string call_line(const CallList& list, ListedCall call) {
  call.step = 0;
  return ddp::str(
      call_text(list, call), " in ", group_line(list.groups[call.group]), ", with peer ", call.peer,
      " and tag ", call.tag);
}

std::vector<std::string> lines_of(const CallList& list) {
  std::vector<std::string> lines;
  for (const auto& group : list.groups) lines.push_back(group_line(group));
  for (const auto& call : list.calls) lines.push_back(call_line(list, call));
  return lines;
}

/// \param in_order  not where threads receive beside the program.
std::string difference(const CallList& real, const CallList& pretended, bool in_order) {
  auto a = lines_of(real), b = lines_of(pretended);
  if (!in_order) std::sort(a.begin(), a.end()), std::sort(b.begin(), b.end());
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const auto was = i < a.size() ? a[i] : "no more", is = i < b.size() ? b[i] : "no more";
    if (was != is)
      return ddp::str(
          "line ", i, " of rank ", real.rank, " is\n    ", was, "\n  pretended\n    ", is);
  }
  return "";
}

std::string faults_of(const std::vector<CallList>& lists) {
  std::string text;
  for (const auto& fault : launch::check_order(lists, launch::find_meetings(lists)))
    text += "\n  " + fault.text;
  return text;
}

}  // namespace

Outcome compare_lists(const Program& program) {
  const TemporaryFolder real_folder, pretended_folder;
  ListedRun real(program, real_folder, {});
  if (auto outcome = real.run(); !outcome.kind.empty()) return outcome;
  std::map<int, CallList> pretended;
  for (const auto& ranks : present_sets(program)) {
    ListedRun run(program, pretended_folder, ranks);
    if (auto outcome = run.run(); !outcome.kind.empty()) return outcome;
    for (const int rank : ranks) pretended[rank] = run.list(rank);
  }
  std::vector<CallList> real_lists, pretended_lists;
  for (const auto& [rank, list] : pretended) {
    real_lists.push_back(real.list(rank));
    pretended_lists.push_back(list);
    const auto text = difference(real_lists.back(), list, !is_pipeline(program, 0));
    if (!text.empty()) return {"lists", text};
    if (!list.is_complete || !real_lists.back().is_complete)
      return {"lists", ddp::str("the list of rank ", rank, " has no end: ", list.error)};
  }
  if (const auto faults = faults_of(real_lists); !faults.empty()) return {"order", faults};
  if (const auto faults = faults_of(pretended_lists); !faults.empty())
    return {"order", "pretended:" + faults};
  const auto broken = break_one(real_lists, program.seed);
  if (!broken.what.empty() && faults_of(broken.lists).empty())
    return {"order", "no fault was found where " + broken.what};
  return {};
}

}  // namespace ddp::differential
