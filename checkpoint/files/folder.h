#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "files/manifest.h"

namespace ddp {

/// The folder that holds a run's checkpoints, one "step-00000120" each. A checkpoint that is being
/// written or removed has a name with a dot before it, which no reader opens.
///
/// All members throw c10::Error with the path and the system's reason.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string path_of(int64_t step) const;
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }

  /// Lists the steps that have a folder, in rising order; none where this folder does not exist.
  std::vector<int64_t> steps() const;
  /// Lists the steps whose folder has a manifest.
  std::vector<int64_t> finished_steps() const;

  /// Gives steps their checkpoint back that a process has lost in publish(). Not during one.
  void restore_replaced() const;

  /// Makes a hidden folder to write a checkpoint to, removes the unfinished folders of earlier
  /// runs, and returns the name of the new one.
  std::string begin(int64_t step);

  /// Renames a complete hidden folder to its final name, and syncs the name to the disk. Replaces
  /// an existing checkpoint of this step in one step, where the file system can.
  void publish(const std::string& hidden_name, int64_t step);

  /// Removes the damaged steps, and all finished steps but the last `keep`; never `just_saved`.
  void remove_old(int64_t keep, int64_t just_saved, const std::vector<int64_t>& damaged);

 private:
  void remove_step(int64_t step);

  std::string path_;
};

/// Reads the manifest of the folder of a checkpoint of `step`.
///
/// \throws DamagedCheckpoint  there is none, or it is not as it was written.
/// \throws c10::Error  it cannot be read, or has another format, or another step.
Manifest read_manifest(const std::string& folder, int64_t step);

/// Compares a file of a checkpoint's folder with the manifest.
///
/// \throws DamagedCheckpoint  it differs, or the manifest lacks it. c10::Error  it cannot be read.
void check_file(const std::string& folder, const Manifest& manifest, const std::string& name);
/// The same with what the manifest has of the file; null: nothing.
void check_file(const std::string& folder, const ManifestFile* known, const std::string& name);

}  // namespace ddp
