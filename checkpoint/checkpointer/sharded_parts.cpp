#include "checkpointer/sharded_parts.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {

bool ShardedParts::contains(const std::string& name) const {
  return std::any_of(
      parts_.begin(), parts_.end(), [&](const ShardedPart& part) { return part.name == name; });
}

void ShardedParts::refresh() {
  RankLayouts layouts;
  for (auto& part : parts_) {
    part.shards = part.callback();
    auto& own = layouts[part.name] = shard_layouts_of(part.name, part.shards);
    if (!part.other_names) continue;
    auto names = part.other_names();
    // With the first box alone: the index has them once.
    for (auto& layout : own) layout.other_names = std::exchange(names[layout.name], {});
  }
  own_ = to_text(layouts);
}

void ShardedParts::release() {
  for (auto& part : parts_) part.shards.clear();
}

std::string ShardedParts::change() const {
  return parts_.empty() || exchanged_ == own_ ? "" : "changed";
}

void ShardedParts::exchange(
    CheckpointPeers& peers, const std::vector<std::string>& changes, const std::string& doing) {
  const auto is_changed = [](const std::string& text) { return !text.empty(); };
  if (std::any_of(changes.begin(), changes.end(), is_changed)) gather(peers, doing);
  for (auto& part : parts_) {
    if (!part.has_copies) continue;
    const auto& own = part.ranks[static_cast<size_t>(peers.rank())];
    for (size_t i = 0; i < own.size(); ++i) part.shards[i].replica = own[i].replica;
  }
}

void ShardedParts::gather(CheckpointPeers& peers, const std::string& doing) {
  exchanged_.reset();
  index_.reset();
  std::vector<RankLayouts> ranks;
  for (const auto& text : peers.gather(own_, doing)) ranks.push_back(layouts_from(text));
  // All ranks have the same texts, and so the same error.
  const auto problem = problem_of([&] {
    const auto names_of = [](const RankLayouts& layouts) {
      std::vector<std::string> names;
      for (const auto& part : layouts) names.push_back(part.first);
      return names;
    };
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      DDP_CHECK_VALUE(
          names_of(ranks[rank]) == names_of(ranks[0]),
          "Checkpointer: expected every rank to add the same sharded parts, got [",
          joined_by(", ", names_of(ranks[0])), "] on rank 0 and [",
          joined_by(", ", names_of(ranks[rank])), "] on rank ", rank, " of ", ranks.size(),
          ". Make the same calls on every rank.");
    }
    for (auto& part : parts_) {
      part.ranks.clear();
      for (auto& layouts : ranks) part.ranks.push_back(std::move(layouts[part.name]));
      if (part.has_copies) number_copies(part.ranks);
      part.tensors = tensors_of(texts_of_part(part.name), part.ranks);
    }
  });
  if (!problem.empty()) peers.throw_agreed(problem);
  exchanged_ = own_;
}

const std::map<std::string, ShardIndex>& ShardedParts::index() {
  if (!index_) {
    std::map<std::string, ShardIndex> index;
    for (const auto& part : parts_) index[part.name] = make_index(part.name, part.ranks);
    index_ = std::move(index);
  }
  return *index_;
}

}  // namespace ddp
