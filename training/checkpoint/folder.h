#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "manifest.h"

namespace ddp {

/// The folder that holds a run's checkpoints, one "step-00000120" each. What is being written or
/// removed has a name with a dot before it, which nobody reads.
///
/// All members throw c10::Error with the path and the system's reason.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  std::string path_of(int64_t step) const;
  std::string path_of(const std::string& name) const { return path_ + "/" + name; }

  /// The steps with a folder, in rising order; none where this folder does not exist.
  std::vector<int64_t> steps() const;
  /// Those with a manifest.
  std::vector<int64_t> finished_steps() const;

  /// Makes a hidden folder to write a checkpoint to, removes what earlier runs left unfinished, and
  /// returns the new one's name.
  std::string begin(int64_t step);

  /// Gives a hidden folder that is whole its name, and puts it on the disk. One that was there
  /// under this name is replaced in one step.
  void publish(const std::string& hidden_name, int64_t step);

  /// Removes the damaged ones, and the finished ones but for the last `keep`; never `just_saved`.
  void remove_old(int64_t keep, int64_t just_saved, const std::vector<int64_t>& damaged);

 private:
  void remove_step(int64_t step);

  std::string path_;
};

/// The manifest of a checkpoint's folder.
///
/// \throws DamagedCheckpoint  none, or one that is not as it was written.
/// \throws c10::Error  it cannot be read, or has another format.
Manifest read_manifest(const std::string& folder);

/// Compares a file with the manifest.
///
/// \throws DamagedCheckpoint  it differs. c10::Error  it cannot be read.
void check_file(const std::string& folder, const ManifestFile& file);

}  // namespace ddp
