#include "shards/shard_reader.h"

#include <utility>

#include <ATen/ATen.h>

#include "files/folder.h"

namespace ddp {

constexpr size_t kMostOpenFiles = 256;
ShardReader::ShardReader(const std::string& part, const Manifest& manifest, std::string folder)
    : manifest_(manifest), index_(manifest.index.at(part)), folder_(std::move(folder)) {}

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
  check_file(folder_, manifest_, file);
  checked_.insert(file);
}

ShardFile& ShardReader::open(const std::string& file) {
  const auto found = opened_.find(file);
  if (found != opened_.end()) return found->second;
  check(file);
  // A process may have 1024 files open, by default, and a checkpoint may have more.
  if (opened_.size() >= kMostOpenFiles) opened_.clear();
  return opened_.try_emplace(file, folder_ + "/" + file).first->second;
}

void ShardReader::read() {
  for (const auto& [name, ranges] : std::exchange(by_file_, {})) {
    auto& file = open(name);
    for (const auto& [from, box, into] : ranges) {
      into.copy_(file.read(from->key, into.scalar_type(), from->box, box));
    }
  }
}

}  // namespace ddp
