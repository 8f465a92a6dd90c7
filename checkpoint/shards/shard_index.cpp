#include "shards/shard_index.h"

#include <algorithm>
#include <cstdio>

#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Throws where two boxes share an element, or where an element is in none.
void check_owners(const std::string& name, const OwnedTensor& tensor, const ShardTexts& texts) {
  const auto& kind = tensor.kind;
  const auto& owned = tensor.boxes;
  int64_t elements = 0;
  std::vector<const TensorBox*> boxes;
  for (const auto& item : owned) {
    elements += c10::multiply_integers(item.box.size);
    boxes.push_back(&item.box);
  }
  if (const auto both = find_overlap(boxes)) {
    const auto ranks = std::minmax(owned[both->first].rank, owned[both->second].rank);
    DDP_CHECK_VALUE(
        false, texts.subject, ": expected one owner of ", name, " ", box_text(both->common),
        texts.place, ", got ",
        ranks.first == ranks.second ? ddp::str("rank ", ranks.first, " twice")
                                    : ddp::str("ranks ", ranks.first, " and ", ranks.second),
        ". Give different tensors different names, and all but one copy a replica number.");
  }
  DDP_CHECK_VALUE(
      elements == c10::multiply_integers(kind.sizes), texts.subject,
      ": expected an owner of every element of ", name, " ", kind_text(kind), texts.place,
      ", got owners of ", elements, " of ", c10::multiply_integers(kind.sizes),
      ". Return the missing boxes on some rank, with replica 0.");
}

}  // namespace

std::string shard_file(const std::string& part, int rank) {
  char number[16];
  std::snprintf(number, sizeof number, "%05d", rank);
  return ddp::str(part, kShardInfix, number, ".pt");
}

std::string shard_key(const std::string& name, const TensorBox& box) {
  return ddp::str(name, "/", joined_by(",", box.offset));
}

bool is_written(const ShardLayout& shard) {
  return shard.replica == 0 && c10::multiply_integers(shard.box.size) > 0;
}

std::map<std::string, OwnedTensor> owners_of(
    const ShardTexts& texts, const std::vector<std::vector<ShardLayout>>& ranks) {
  std::map<std::string, OwnedTensor> tensors;
  for (auto& [name, kind] : tensors_of(texts, ranks)) tensors[name].kind = kind;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& shard : ranks[rank]) {
      auto& tensor = tensors.at(shard.name);
      if (is_written(shard)) tensor.boxes.push_back({rank, shard.box});
      for (const auto& other : shard.other_names) {
        if (!contains(tensor.other_names, other)) tensor.other_names.push_back(other);
      }
    }
  }
  for (auto& [name, tensor] : tensors) {
    std::stable_sort(
        tensor.boxes.begin(), tensor.boxes.end(),
        [](const OwnedBox& a, const OwnedBox& b) { return a.box.offset < b.box.offset; });
    check_owners(name, tensor, texts);
  }
  return tensors;
}

ShardIndex make_index(const std::string& part, const std::vector<std::vector<ShardLayout>>& ranks) {
  ShardIndex index;
  for (const auto& [name, owned] : owners_of(texts_of_part(part), ranks)) {
    auto& tensor = index[name];
    tensor.kind = owned.kind;
    tensor.other_names = owned.other_names;
    for (const auto& [rank, box] : owned.boxes) {
      tensor.boxes.push_back({shard_file(part, static_cast<int>(rank)), shard_key(name, box), box});
    }
  }
  return index;
}

}  // namespace ddp
