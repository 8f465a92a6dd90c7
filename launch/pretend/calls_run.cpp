#include "launch/pretend/calls_run.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <ddp/internal/text.h>

#include "launch/pretend/call_list.h"
#include "launch/pretend/report.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr int kFaulty = 1;

/// A folder that is removed with this.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "ddprun_XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) throw_errno("cannot make " + path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

int report_on(
    const std::string& folder, const std::vector<int>& ranks, const CallsOptions& options) {
  const auto report = make_report(read_call_lists(folder, ranks), options.links);
  print(options.json ? json_of(report) : text_of(report));
  return report.faults.empty() ? 0 : kFaulty;
}

/// The lists that are there: ranks that failed early, or were ended, may have written none. A
/// program that failed may have ended its list by exit().
std::vector<CallList> readable_lists(const std::string& folder, const std::vector<int>& ranks) {
  std::vector<CallList> lists;
  for (const int rank : ranks) {
    try {
      lists.push_back(read_call_lists(folder, {rank}).front());
      lists.back().is_complete = false;
    } catch (const std::exception&) {
      continue;
    }
  }
  return lists;
}

/// A fault in the order may be why the ranks failed.
void report_on_failed(
    const std::string& folder, const std::vector<int>& ranks, const CallsOptions& options,
    int code) {
  const auto report = make_report(readable_lists(folder, ranks), options.links);
  if (options.json) return print(json_of_failed(report, code));
  for (const auto& line : lines_of_faults(report.faults)) {
    std::fprintf(stderr, "ddprun: %s\n", line.c_str());
  }
  if (report.faults.empty() && ranks.front() != 0) {
    std::fputs(
        "ddprun: a program that says on rank 0 alone why it fails says it with 0 among --ranks\n",
        stderr);
  }
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (!error) return;
  throw std::runtime_error(
      str("--calls: expected a folder that can be made, got '", folder, "': ", error.message()));
}

void remove_lists(const std::string& folder, const std::vector<int>& ranks) {
  for (const int rank : ranks) std::filesystem::remove(folder + '/' + call_list_file(rank));
}

}  // namespace

int run_with_calls(LaunchOptions options, const std::function<int(const LaunchOptions&)>& run) {
  auto& calls = options.calls;
  if (!calls.check.empty()) return report_on(calls.check, {}, calls);
  if (!calls.folder.empty()) make_folder(calls.folder);
  if (!options.pretended) return run(options);
  std::optional<TemporaryFolder> temporary;
  if (calls.folder.empty()) calls.folder = temporary.emplace().path();
  const auto& ranks = options.pretended->present;
  remove_lists(calls.folder, ranks);
  const int code = run(options);
  if (code == 0) return report_on(calls.folder, ranks, calls);
  report_on_failed(calls.folder, ranks, calls, code);
  return code;
}

}  // namespace ddp::launch
