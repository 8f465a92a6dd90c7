#include "files/folder.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <string_view>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

constexpr const char* kStepPrefix = "step-";
constexpr const char* kSavingPrefix = ".saving-";
constexpr const char* kRemovingPrefix = ".removing-";
constexpr const char* kReplacedPrefix =
    ".replaced-";  // whole: it may be the step's only checkpoint

std::string step_name(int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "%s%08" PRId64, kStepPrefix, step);
  return name;
}

// Returns the step, or -1 for another name.
int64_t step_of(const std::string& name) {
  if (!begins_with(name, kStepPrefix)) return -1;
  const auto* const digits = name.data() + std::string_view(kStepPrefix).size();
  int64_t step = -1;
  std::from_chars(digits, name.data() + name.size(), step);
  return step >= 0 && step_name(step) == name ? step : -1;
}

// The hidden name of a step's folder, with a suffix of its own.
std::string hidden_name_of(const char* prefix, int64_t step) {
  return ddp::str(prefix, step_name(step), "-", unique_suffix());
}

}  // namespace

std::string CheckpointFolder::path_of(int64_t step) const { return path_of(step_name(step)); }

std::vector<int64_t> CheckpointFolder::steps() const {
  const auto kind = kind_of_path(path_);
  if (kind == PathKind::Nothing) return {};
  DDP_CHECK(
      kind == PathKind::Folder, path_,
      ": expected a folder of checkpoints, got a file. Name a folder.");
  std::vector<int64_t> steps;
  for (const auto& name : names_in_folder(path_)) {
    if (const auto step = step_of(name); step >= 0) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::vector<int64_t> CheckpointFolder::finished_steps() const {
  auto steps = this->steps();
  const auto is_unfinished = [&](int64_t step) {
    return kind_of_path(path_of(step)) != PathKind::Folder ||
           kind_of_path(path_of(step) + "/" + kManifestName) != PathKind::File;
  };
  steps.erase(std::remove_if(steps.begin(), steps.end(), is_unfinished), steps.end());
  return steps;
}

std::string CheckpointFolder::begin(int64_t step) {
  make_folders(path_);
  restore_replaced();
  for (const auto& name : names_in_folder(path_)) {
    for (const auto* prefix : {kSavingPrefix, kRemovingPrefix, kReplacedPrefix}) {
      if (begins_with(name, prefix)) remove_path(path_of(name));
    }
  }
  auto hidden = hidden_name_of(kSavingPrefix, step);
  make_folders(path_of(hidden));
  return hidden;
}

void CheckpointFolder::publish(const std::string& hidden_name, int64_t step) {
  const auto hidden = path_of(hidden_name);
  const auto path = path_of(step);
  auto old = path_of(hidden_name_of(kRemovingPrefix, step));
  sync_folder(hidden);
  if (kind_of_path(path) == PathKind::Nothing) {
    rename_path(hidden, path);
  } else if (exchange_paths(hidden, path)) {
    rename_path(hidden, old);
  } else {
    // A file system without an exchange, as NFS: a process that ends between the two leaves the old
    // one for restore_replaced().
    old = path_of(hidden_name_of(kReplacedPrefix, step));
    rename_path(path, old);
    rename_path(hidden, path);
  }
  sync_folder(path_);
  remove_path(old);
}

void CheckpointFolder::restore_replaced() const {
  if (kind_of_path(path_) != PathKind::Folder) return;
  for (const auto& name : names_in_folder(path_)) {
    if (!begins_with(name, kReplacedPrefix)) continue;
    const auto begin = std::string_view(kReplacedPrefix).size();
    const auto step = path_of(name.substr(begin, name.rfind('-') - begin));
    // Fails where the step has a checkpoint, or another rank was first.
    (void)rename(path_of(name).c_str(), step.c_str());
  }
}

// Renames the folder to a hidden name first: a folder that lacks files would look damaged.
void CheckpointFolder::remove_step(int64_t step) {
  const auto hidden = path_of(hidden_name_of(kRemovingPrefix, step));
  rename_path(path_of(step), hidden);
  remove_path(hidden);
}

void CheckpointFolder::remove_old(
    int64_t keep, int64_t just_saved, const std::vector<int64_t>& damaged) {
  for (const auto step : damaged) {
    if (step != just_saved && kind_of_path(path_of(step)) == PathKind::Folder) remove_step(step);
  }
  if (keep == 0) return;
  auto steps = finished_steps();
  steps.erase(std::remove(steps.begin(), steps.end(), just_saved), steps.end());
  const auto kept = static_cast<size_t>(keep - 1);
  for (size_t i = 0; i + kept < steps.size(); ++i) remove_step(steps[i]);
}

Manifest read_manifest(const std::string& folder, int64_t step) {
  if (kind_of_path(folder) != PathKind::Folder) throw DamagedCheckpoint(folder + " is no folder");
  const auto path = ddp::str(folder, "/", kManifestName);
  if (kind_of_path(path) != PathKind::File) {
    throw DamagedCheckpoint(ddp::str(folder, " has no ", kManifestName));
  }
  auto manifest = parse_manifest(read_whole_file(path, kMaxManifestBytes), path);
  DDP_CHECK(
      manifest.step == step, folder, ": expected the checkpoint of step ", step,
      ", as its name says, got that of step ", manifest.step,
      ". Give it its name back, or move it elsewhere.");
  return manifest;
}

void check_file(const std::string& folder, const Manifest& manifest, const std::string& name) {
  check_file(folder, manifest.find(name), name);
}

void check_file(const std::string& folder, const ManifestFile* known, const std::string& name) {
  if (known == nullptr) {
    throw DamagedCheckpoint(ddp::str(folder, " has no ", name, " in its ", kManifestName));
  }
  const auto path = folder + "/" + name;
  if (kind_of_path(path) != PathKind::File) throw DamagedCheckpoint(path + " is missing");
  const auto sum = sum_of_file(path);
  if (sum == known->sum) return;
  throw DamagedCheckpoint(ddp::str(
      path, " is damaged: it has ", sum.bytes, " bytes with the CRC-32C ", hexadecimal(sum.crc32c),
      ", and was written with ", known->sum.bytes, " and ", hexadecimal(known->sum.crc32c)));
}

}  // namespace ddp
