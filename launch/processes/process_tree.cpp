#include "launch/processes/process_tree.h"

#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

/// Reads one /proc/<pid>/stat: "pid (name) state parent group ...", where the name may hold
/// anything. Empty when the process is gone, or a zombie.
std::optional<Process> read_process(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  char state = 0;
  Process process = {};
  if (std::sscanf(
          line.c_str() + name_end + 1, " %c %d %d", &state, &process.parent, &process.group) != 3) {
    return std::nullopt;
  }
  if (state == 'Z' || state == 'X') return std::nullopt;
  process.pid = static_cast<pid_t>(std::atoi(pid.c_str()));
  return process;
}

std::vector<Process> all_processes() {
  std::vector<Process> result;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(::opendir("/proc"), ::closedir);
  if (!proc) return result;
  while (const dirent* entry = ::readdir(proc.get())) {
    if (!std::isdigit(static_cast<unsigned char>(entry->d_name[0]))) continue;
    if (const auto process = read_process(entry->d_name)) result.push_back(*process);
  }
  return result;
}

/// Reaps all children that have ended; returns whether any child is left.
bool reap_children() {
  for (;;) {
    const pid_t pid = ::waitpid(-1, nullptr, WNOHANG);
    if (pid < 0) return false;
    if (pid == 0) return true;
  }
}

}  // namespace

std::vector<Process> descendants() {
  const std::vector<Process> all = all_processes();
  std::vector<Process> found;
  std::set<pid_t> ancestors = {::getpid()};
  // A child may come before its parent in /proc, so repeat until a pass finds nothing new.
  for (size_t before = 0; before != ancestors.size();) {
    before = ancestors.size();
    for (const Process& process : all) {
      if (ancestors.count(process.parent) == 0) continue;
      if (ancestors.insert(process.pid).second) found.push_back(process);
    }
  }
  return found;
}

std::optional<int> reap(pid_t child, int options) {
  int status = 0;
  const pid_t reaped = ::waitpid(child, &status, options);
  if (reaped < 0) throw_errno("cannot wait for process " + std::to_string(child));
  if (reaped == 0) return std::nullopt;
  return status;
}

std::vector<Process> kill_descendants(std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (reap_children()) {
    auto left = descendants();
    if (std::chrono::steady_clock::now() > deadline) return left;
    for (const Process& process : left) ::kill(process.pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return {};
}

}  // namespace ddp::launch
