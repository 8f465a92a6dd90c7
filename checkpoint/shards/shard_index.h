#pragma once

#include <map>
#include <string>
#include <vector>

#include "shards/layout.h"

namespace ddp {

/// Where a checkpoint has a box of a tensor.
struct IndexedBox {
  std::string file;  // "model.shard-00003.pt"
  std::string key;   // in the file's dictionary: "fc.weight/256,0"
  TensorBox box;
};

struct IndexedTensor {
  TensorKind kind;
  std::vector<IndexedBox> boxes;  // each element is in one
  /// Further names of a tensor that modules of the model share. Only consolidate_checkpoint() needs
  /// them: a load goes by the first name.
  std::vector<std::string> other_names = {};
};

using ShardIndex = std::map<std::string, IndexedTensor>;

/// The infix of the names of shard files; no part's name has it.
inline constexpr const char* kShardInfix = ".shard-";

std::string shard_file(const std::string& part, int rank);

std::string shard_key(const std::string& name, const TensorBox& box);

/// Whether a save writes a shard.
bool is_written(const ShardLayout& shard);

struct OwnedBox {
  size_t rank = 0;
  TensorBox box;
};

struct OwnedTensor {
  TensorKind kind;
  std::vector<OwnedBox> boxes;  // in the order of their offsets; each element is in one
  std::vector<std::string> other_names;
};

/// Lists which rank writes which box, by tensor. A pure function: all ranks make the same list.
///
/// \param ranks  the ranks' layouts.
/// \throws c10::ValueError  an element that no rank writes, or that two ranks do; and as
///         tensors_of().
std::map<std::string, OwnedTensor> owners_of(
    const ShardTexts& texts, const std::vector<std::vector<ShardLayout>>& ranks);

/// Lists which rank writes which box. A pure function: all ranks make the same index.
///
/// \param ranks  the ranks' layouts of the part.
/// \throws c10::ValueError  as owners_of().
ShardIndex make_index(const std::string& part, const std::vector<std::vector<ShardLayout>>& ranks);

}  // namespace ddp
