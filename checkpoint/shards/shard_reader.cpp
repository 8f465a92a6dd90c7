#include "shards/shard_reader.h"

#include <utility>

#include <ATen/ATen.h>
#include <ddp/internal/text.h>

#include "files/folder.h"
#include "shards/shard_file.h"

namespace ddp {
namespace {

// Returns the view of a shard's elements that `box` names.
at::Tensor view_of(const at::Tensor& shard, const std::vector<int64_t>& offset, const Box& box) {
  auto view = shard;
  for (size_t d = 0; d < box.size.size(); ++d) {
    view = view.narrow(static_cast<int64_t>(d), box.offset[d] - offset[d], box.size[d]);
  }
  return view;
}

}  // namespace

ShardReader::ShardReader(const std::string& part, const Manifest& manifest, std::string folder)
    : manifest_(manifest), index_(manifest.index.at(part)), folder_(std::move(folder)) {}

void ShardReader::add(const IndexedTensor& saved, const Box& box, const at::Tensor& into) {
  for (const auto& from : saved.boxes) {
    auto common = intersection(box, from.box);
    if (!common) continue;
    const auto view = view_of(into, box.offset, *common);
    by_file_[from.file].push_back({&from, std::move(*common), view});
  }
}

void ShardReader::read() const {
  for (const auto& [name, ranges] : by_file_) {
    const auto* known = manifest_.find(name);
    if (known == nullptr) {
      throw DamagedCheckpoint(ddp::str(folder_, " has no ", name, " in its ", kManifestName));
    }
    check_file(folder_, *known);
    ShardFile file(folder_ + "/" + name);
    for (const auto& [from, box, into] : ranges) {
      into.copy_(file.read(from->key, into.scalar_type(), from->box, box));
    }
  }
}

}  // namespace ddp
