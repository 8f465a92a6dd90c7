#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include "folder.h"

namespace ddp {

/// What one rank writes of a checkpoint.
struct SavePlan {
  CheckpointFolder folder;
  std::string hidden;  // the name of the folder within, where all ranks write
  int64_t step = 0;
  int rank = 0;
  int world_size = 1;
  int64_t keep_last = 0;
  std::vector<int64_t> damaged_steps;                      // to be removed
  std::vector<std::pair<std::string, c10::IValue>> files;  // by name; tensors on the host
};

/// Writes a rank's part of a checkpoint on a thread of its own. Rank 0's thread then waits for the
/// other ranks' parts, which it finds in the folder, writes the manifest, and gives the folder its
/// name: no rank's training loop is needed for that. A rank that cannot write its part leaves the
/// reason there instead.
///
/// As long as nobody waits for it, the thread works for one part in twenty of the time, so that
/// training steps keep the cores.
///
/// Thread safety: one thread makes, asks and destroys it.
class SaveJob {
 public:
  explicit SaveJob(SavePlan plan);
  /// Cancels.
  ~SaveJob();
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;

  /// Waits until this rank's files are on the disk. \return why they are not, or "".
  std::string wait_for_files();

  /// Every rank's files are on the disk. Waits until the checkpoint has its name, on rank 0; the
  /// other ranks have nothing more to do. \return why it has not, or "".
  std::string wait_for_end();

  /// Waits as long for the end as nobody says that the other ranks are done.
  /// \return whether it came.
  bool ends_within(std::chrono::milliseconds patience);

  /// Rank 0 waits for the others no longer. The unfinished checkpoint is removed.
  void cancel();

 private:
  void run() noexcept;
  void write_own_files();
  void leave_for_first(const std::string& file, const std::string& text);
  void leave_failure(const std::string& error);
  void write_paced(OutputFile& file, const char* data, size_t size);
  void pause_for_steps();
  std::vector<ManifestFile> files_of_others();
  bool wait_to_look_again();
  void publish();
  std::string path_of(const std::string& file) const;
  void note(bool SaveJob::*milestone, const std::string& error);

  SavePlan plan_;
  std::vector<ManifestFile> written_;         // the thread's
  std::chrono::nanoseconds cpu_at_pause_{0};  // likewise: what it had used
  std::string files_error_;                   // its to write until has_files_

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool has_files_ = false;
  bool has_ended_ = false;
  bool is_cancelled_ = false;
  bool is_awaited_ = false;
  bool others_are_done_ = false;
  std::string error_;

  std::thread thread_;
};

/// The name of a rank's file: "rank-1.pt".
std::string rank_file(int rank);

}  // namespace ddp
