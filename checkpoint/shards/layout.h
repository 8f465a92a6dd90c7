#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ddp/sharded_tensor.h>

#include "shards/box.h"

namespace ddp {

struct TensorKind {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
};

/// Writes "[4, 3] Float".
std::string kind_text(const TensorKind& kind);

/// A `ShardedTensor` without its elements, as the other ranks see it.
struct ShardLayout {
  std::string name;
  TensorKind kind;
  TensorBox box;
  int64_t replica = 0;
  std::optional<int64_t> stage = {};
  std::vector<std::string> other_names = {};  // of a tensor that modules share
};

/// The layouts of one rank, by part.
using RankLayouts = std::map<std::string, std::vector<ShardLayout>>;

/// \throws c10::ValueError  a shard is not a dense tensor within its whole tensor.
std::vector<ShardLayout> shard_layouts_of(
    const std::string& part, const std::vector<ShardedTensor>& shards);

/// Numbers equal boxes of several ranks, by rank, so that the first rank's is written.
void number_copies(std::vector<std::vector<ShardLayout>>& ranks);

/// Texts for the other ranks, and back.
std::string to_text(const RankLayouts& layouts);
RankLayouts layouts_from(const std::string& text);

/// Names for errors of shards: "Checkpointer" and " in part \"model\"".
struct ShardTexts {
  std::string subject, place;
};

ShardTexts texts_of_part(const std::string& part);

/// Returns the tensors that any rank has a shard of, by name.
///
/// \param ranks  the ranks' layouts.
/// \throws c10::ValueError  two ranks have another dtype or shape, or two stages of a pipeline a
///         tensor of one name.
std::map<std::string, TensorKind> tensors_of(
    const ShardTexts& texts, const std::vector<std::vector<ShardLayout>>& ranks);

}  // namespace ddp
