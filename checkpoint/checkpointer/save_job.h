#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>

#include "files/folder.h"
#include "shards/shard_index.h"

namespace ddp {

/// The parts of a checkpoint that one rank writes.
struct SavePlan {
  CheckpointFolder folder;
  std::string hidden;  // name of the hidden folder within `folder`, to which all ranks write
  int64_t step = 0;
  int rank = 0;
  int world_size = 1;
  int64_t keep_last = 0;
  std::vector<int64_t> damaged_steps;                      // to be removed
  std::vector<std::pair<std::string, c10::IValue>> files;  // by name; tensors on the host
  std::map<std::string, ShardIndex> index = {};            // of the sharded parts, on rank 0
};

/// Writes a rank's part of a checkpoint on a thread of its own. Rank 0's thread then polls the
/// folder for the other ranks' parts, writes the manifest, and renames the folder to its final
/// name: no rank's training loop is needed for that. A rank that cannot write its part writes the
/// reason into the folder instead.
///
/// Until wait_for_files() is called, the thread works one part in twenty of the time, so that
/// training steps keep the cores.
///
/// Thread safety: one thread constructs, calls and destroys it.
class SaveJob {
 public:
  explicit SaveJob(SavePlan plan);
  /// Cancels, and joins the thread.
  ~SaveJob();
  C10_DISABLE_COPY_AND_ASSIGN(SaveJob);

  /// Waits until this rank's files are on the disk. \return the reason why they are not, or "".
  std::string wait_for_files();

  /// Call it when every rank's files are on the disk. Waits on rank 0 until the checkpoint has its
  /// final name; the other ranks have nothing more to do. \return the reason why it has not, or "".
  std::string wait_for_end();

  /// Waits for the end at most `patience`, while other ranks may still be writing.
  /// \return whether the job has ended.
  bool ends_within(std::chrono::milliseconds patience);

  /// Stops waiting for the other ranks. Rank 0 then removes the unfinished checkpoint.
  void cancel();

 private:
  /// How far the thread is, in order.
  enum class Progress { Writing, HasFiles, Ended };
  /// The owner's request, in order: a later one stays.
  enum class Request {
    Background,     // training steps first
    Prompt,         // the owner waits
    OthersAreDone,  // and every rank's files are on the disk
    Cancelled,
  };

  void run() noexcept;
  void remove_hidden_folder();
  void write_own_files();
  void write_atomically(const std::string& file, const std::string& text);
  void write_failure_file(const std::string& error);
  void write_paced(OutputFile& file, const char* data, size_t size);
  void pause_for_steps();
  std::vector<ManifestFile> wait_for_files_of_others();
  bool wait_to_poll();
  void publish();
  std::string path_of(const std::string& file) const;
  void set_progress(Progress progress, const std::string& error);
  void raise(Request request);

  SavePlan plan_;
  std::vector<ManifestFile> written_;         // the thread's own
  std::chrono::nanoseconds cpu_at_pause_{0};  // the thread's own: CPU time used at the last pause
  std::string files_error_;                   // the thread writes it before Progress::HasFiles

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Progress progress_ = Progress::Writing;
  Request request_ = Request::Background;
  std::string error_;

  std::thread thread_;
};

/// Returns the name of a rank's file: "rank-1.pt".
std::string rank_file(int rank);

}  // namespace ddp
