#include "shards/shard_reader.h"

#include <utility>

#include <ATen/ATen.h>

#include "files/folder.h"

namespace ddp {

constexpr size_t kMostOpenFiles = 256;
ShardReader::ShardReader(const std::string& part, const Manifest& manifest, std::string folder)
    : index_(manifest.index.at(part)), folder_(std::move(folder)) {
  for (const auto& file : manifest.files) in_manifest_.emplace(file.name, &file);
}

void ShardReader::add(const IndexedTensor& saved, const TensorBox& box, const at::Tensor& into) {
  for (const auto& from : saved.boxes) {
    auto common = intersection(box, from.box);
    if (!common) continue;
    const auto view = box_view(into, box.offset, *common);
    by_file_[from.file].push_back({&from, std::move(*common), view});
  }
}

void ShardReader::check(const std::string& file) {
  if (checked_.count(file) > 0) return;
  const auto found = in_manifest_.find(file);
  check_file(folder_, found == in_manifest_.end() ? nullptr : found->second, file);
  checked_.insert(file);
}

/// A tensor that is cut over more ranks than files may be open reads all of them, and so does the
/// next one: their dictionaries have all tensors, and are read once.
ShardFile& ShardReader::known(const std::string& file) {
  const auto found = known_.find(file);
  const bool is_open = found != known_.end() && found->second.is_open();
  if (is_open) return found->second;
  make_room();
  if (found == known_.end()) check(file);
  auto& known = found == known_.end() ? known_.try_emplace(file, folder_ + "/" + file).first->second
                                      : found->second;
  open_.push_back(&known);
  return known;
}

/// A process may have 1024 files open, by default, and a checkpoint may have more.
void ShardReader::make_room() {
  if (open_.size() < kMostOpenFiles) return;
  for (auto* file : std::exchange(open_, {})) file->close();
}

void ShardReader::read() {
  for (const auto& [name, ranges] : std::exchange(by_file_, {})) {
    auto& file = known(name);
    for (const auto& [from, box, into] : ranges) {
      into.copy_(file.read(from->key, into.scalar_type(), from->box, box));
    }
  }
}

}  // namespace ddp
