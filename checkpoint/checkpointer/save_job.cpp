#include "checkpointer/save_job.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <ddp/version.h>
#include <torch/version.h>

#include "python/torch_file.h"

namespace ddp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// How long rank 0 waits until it sees the files of other ranks: network file systems cache for
// seconds that a file did not exist.
constexpr seconds kVisibilityTimeout(30);
constexpr milliseconds kPollInterval(5);
constexpr size_t kMaxDoneBytes = size_t{1} << 24;
constexpr size_t kMaxFailureBytes = size_t{1} << 16;
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr int kPausePerWork = 20;

// A rank writes this file for rank 0 once its own file is on the disk.
std::string done_file(int rank) { return ddp::str("rank-", rank, ".done"); }

// A rank writes this file instead where it cannot write its own file.
std::string failure_file(int rank) { return ddp::str("rank-", rank, ".failed"); }

// Gives training steps priority where cores are few; a rank that waits for this thread leaves it a
// core anyway.
void lower_thread_priority() {
  constexpr int kNiceness = 15;
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
}

std::chrono::nanoseconds cpu_of_thread() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
}

// Reads a line for each file: its size, its checksum and its name.
std::vector<ManifestFile> parse_done(const std::string& text, const std::string& path) {
  std::vector<ManifestFile> files;
  for (const auto& line : lines_of(text)) {
    FileSum sum;
    char name[256] = {};
    DDP_CHECK(
        std::sscanf(line.c_str(), "%" SCNu64 " %" SCNx32 " %255s", &sum.bytes, &sum.crc32c, name) ==
            3,
        path, ": expected sizes, checksums and names, got something else. Check the file system.");
    files.push_back({name, sum});
  }
  return files;
}

}  // namespace

std::string rank_file(int rank) { return ddp::str("rank-", rank, ".pt"); }

SaveJob::SaveJob(SavePlan plan) : plan_(std::move(plan)), thread_([this] { run(); }) {}

SaveJob::~SaveJob() {
  cancel();
  thread_.join();
}

std::string SaveJob::wait_for_files() {
  raise(Request::Prompt);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return progress_ >= Progress::HasFiles; });
  return files_error_;
}

std::string SaveJob::wait_for_end() {
  raise(Request::OthersAreDone);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return progress_ == Progress::Ended; });
  return error_;
}

bool SaveJob::ends_within(milliseconds patience) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return progress_ == Progress::Ended; });
}

void SaveJob::cancel() { raise(Request::Cancelled); }

void SaveJob::raise(Request request) {
  const std::lock_guard lock(mutex_);
  request_ = std::max(request_, request);
  changed_.notify_all();
}

void SaveJob::set_progress(Progress progress, const std::string& error) {
  const std::lock_guard lock(mutex_);
  progress_ = progress;
  if (!error.empty()) error_ = error;
  changed_.notify_all();
}

std::string SaveJob::path_of(const std::string& file) const {
  return plan_.folder.path_of(plan_.hidden) + "/" + file;
}

void SaveJob::run() noexcept {
  lower_thread_priority();
  auto error = problem_of([&] { write_own_files(); });
  if (!error.empty() && plan_.rank > 0) problem_of([&] { write_failure_file(error); });
  plan_.files.clear();  // the copies of the state
  files_error_ = error;
  set_progress(Progress::HasFiles, error);
  if (plan_.rank == 0) {
    if (error.empty()) error = problem_of([&] { publish(); });
    if (!error.empty()) remove_hidden_folder();
  }
  set_progress(Progress::Ended, error);
}

// Another rank may write a file into the folder while this one removes it: then it is not empty.
void SaveJob::remove_hidden_folder() {
  constexpr int kMostTries = 100;
  const auto path = plan_.folder.path_of(plan_.hidden);
  bool is_gone = false;
  for (int tries = 0; tries < kMostTries && !is_gone; ++tries) {
    if (tries > 0) std::this_thread::sleep_for(kPollInterval);
    problem_of([&] {
      remove_path(path);
      is_gone = kind_of_path(path) == PathKind::Nothing;
    });
  }
}

void SaveJob::write_own_files() {
  for (const auto& [name, value] : plan_.files) {
    OutputFile file(path_of(name));
    write_torch_file(value, [&](const void* data, size_t size) {
      write_paced(file, static_cast<const char*>(data), size);
    });
    written_.push_back({name, file.finish()});
  }
  if (plan_.rank == 0) return;
  std::string done;
  for (const auto& [name, sum] : written_) {
    done += ddp::str(sum.bytes, " ", hexadecimal(sum.crc32c), " ", name, "\n");
  }
  write_atomically(done_file(plan_.rank), done);
}

void SaveJob::write_atomically(const std::string& file, const std::string& text) {
  replace_file(path_of(file), [&](OutputFile& out) { out.write(text.data(), text.size()); });
}

void SaveJob::write_failure_file(const std::string& error) {
  // Frees space for the failure file on a full disk.
  for (const auto& file : plan_.files) remove_path(path_of(file.first));
  write_atomically(failure_file(plan_.rank), error);
}

void SaveJob::write_paced(OutputFile& file, const char* data, size_t size) {
  for (size_t at = 0; at < size; at += kPieceBytes) {
    file.write(data + at, std::min(kPieceBytes, size - at));
    pause_for_steps();
  }
}

void SaveJob::pause_for_steps() {
  const auto work = cpu_of_thread() - cpu_at_pause_;
  if (work < milliseconds(1)) return;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kPausePerWork * work, [&] { return request_ != Request::Background; });
  cpu_at_pause_ = cpu_of_thread();
}

// Returns false where the save was cancelled.
bool SaveJob::wait_to_poll() {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, kPollInterval, [&] { return request_ == Request::Cancelled; });
}

std::vector<ManifestFile> SaveJob::wait_for_files_of_others() {
  std::vector<ManifestFile> files;
  std::string failures;
  auto done_since = std::chrono::steady_clock::now();
  for (int rank = 1; rank < plan_.world_size; ++rank) {
    const auto path = path_of(done_file(rank));
    const auto failure = path_of(failure_file(rank));
    bool has_failed = false;
    while (kind_of_path(path) == PathKind::Nothing) {
      has_failed = kind_of_path(failure) != PathKind::Nothing;
      if (has_failed) break;
      DDP_CHECK(
          wait_to_poll(), "step ", plan_.step, " was not saved: rank ", rank,
          " did not finish its part. Load an earlier step.");
      const std::lock_guard lock(mutex_);
      const auto now = std::chrono::steady_clock::now();
      if (request_ < Request::OthersAreDone) done_since = now;
      DDP_CHECK(
          now - done_since < kVisibilityTimeout, path, ": expected what rank ", rank,
          " wrote, got nothing. Name a folder that all ranks share.");
    }
    // Continue: the other ranks may still be writing, and need the folder until they are done.
    if (has_failed) {
      failures += ddp::str(" On rank ", rank, ": ", read_whole_file(failure, kMaxFailureBytes));
      continue;
    }
    for (auto& file : parse_done(read_whole_file(path, kMaxDoneBytes), path)) {
      files.push_back(std::move(file));
    }
    remove_path(path);
  }
  DDP_CHECK(failures.empty(), "step ", plan_.step, " was not saved.", failures);
  return files;
}

void SaveJob::publish() {
  Manifest manifest;
  manifest.step = plan_.step;
  manifest.world_size = plan_.world_size;
  manifest.library_version = DDP_VERSION;
  manifest.libtorch_version = TORCH_VERSION;
  manifest.files = written_;
  manifest.index = std::move(plan_.index);
  for (auto& file : wait_for_files_of_others()) manifest.files.push_back(std::move(file));
  const auto json = to_json(manifest);
  DDP_CHECK(
      json.size() <= kMaxManifestBytes, "step ", plan_.step, " was not saved: its manifest has ",
      json.size(), " bytes, more than ", kMaxManifestBytes, ". Add larger or fewer shards.");
  write_whole_file(path_of(kManifestName), json);
  plan_.folder.publish(plan_.hidden, plan_.step);
  plan_.folder.remove_old(plan_.keep_last, plan_.step, plan_.damaged_steps);
}

}  // namespace ddp
