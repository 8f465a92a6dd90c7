#include "checkpointer/sharded_parts.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "python/torch_file.h"
#include "shards/shard_reader.h"

namespace ddp {
namespace {

// Compares the program's tensors with the saved ones. Returns the differences that are no errors.
std::string compare_tensors(
    const ShardedPart& part, const ShardIndex& index, const std::string& subject, bool strict) {
  std::vector<std::string> missing, additional;
  std::string unlike;
  for (const auto& [name, kind] : part.tensors) {
    const auto found = index.find(name);
    if (found == index.end()) {
      missing.push_back(name);
      continue;
    }
    const auto& saved = found->second.kind;
    if (kind.sizes == saved.sizes && (!strict || kind.dtype == saved.dtype)) continue;
    unlike += ddp::str(
        unlike.empty() ? "" : "; ", '"', name, "\" is ", kind_text(kind), " in the program and ",
        kind_text(saved), " in the checkpoint");
  }
  for (const auto& entry : index) {
    if (part.tensors.count(entry.first) == 0) additional.push_back(entry.first);
  }
  DDP_CHECK_VALUE(
      unlike.empty(), subject, ": expected the program's shapes and dtypes, but ", unlike,
      ". Build the model as it was saved.");
  auto names = lacking_names("the program", "the checkpoint", missing, additional);
  DDP_CHECK_VALUE(
      !strict || names.empty(), subject, ": expected the program's names, but ", names,
      ". Build the model as it was saved, or load it with strict(false).");
  return names;
}

// A load that wrote into a temporary tensor of the callback would be lost without a word.
void check_can_be_written(const ShardedTensor& shard, const std::string& subject) {
  const auto& local = shard.local;
  if (local.numel() == 0) return;
  const bool is_temporary = local.use_count() == 1 && local.storage().use_count() == 1 &&
                            local.storage().allocator() != nullptr;
  DDP_CHECK_VALUE(
      !is_temporary, subject,
      ": expected tensors that a load can write into, got a temporary one for ", shard.name,
      ". Return the model's tensor, or a view of it.");
  DDP_CHECK_VALUE(
      at::has_internal_overlap(local) != at::MemOverlap::Yes && !local.is_inference(), subject,
      ": expected tensors that a load can write into, got an expanded or an inference tensor for ",
      shard.name, ". Return one with memory for each element.");
}

}  // namespace

c10::IValue copy_written_shards(const std::vector<ShardedTensor>& shards, TensorsOnHost& copies) {
  auto dict = make_dict();
  for (const auto& shard : shards) {
    const TensorBox box{shard.offset, shard.local.sizes().vec()};
    if (shard.replica != 0 || c10::multiply_integers(box.size) == 0) continue;
    // Row by row, whatever the strides: ranges of it are read.
    dict.insert(
        shard_key(shard.name, box), copies.copy(shard.local, TensorsOnHost::Order::RowByRow));
  }
  return dict;
}

PreparedLoad prepare_shards(
    const ShardedPart& part, const Manifest& manifest, const std::string& folder, bool strict) {
  const auto& index = manifest.index.at(part.name);
  const auto subject = ddp::str(folder, ", part \"", part.name, '"');
  PreparedLoad load;
  if (auto names = compare_tensors(part, index, subject, strict); !names.empty()) {
    load.notice = ddp::str(subject, ": ", names, ".");
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  ShardReader reader(part.name, manifest, folder);
  for (const auto& shard : part.shards) {
    const auto saved = index.find(shard.name);
    if (saved == index.end()) continue;
    check_can_be_written(shard, subject);
    const TensorBox own{shard.offset, shard.local.sizes().vec()};
    const auto staged = at::empty(own.size, saved->second.kind.dtype);
    copies.emplace_back(shard.local, staged);
    reader.add(saved->second, own, staged);
  }
  reader.read();
  load.apply = [copies = std::move(copies)] {
    const c10::NoGradGuard no_grad;
    for (const auto& [to, from] : copies) to.copy_(from);
  };
  return load;
}

bool ShardedParts::contains(const std::string& name) const {
  return any_of(parts_, [&](const ShardedPart& part) { return part.name == name; });
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
  if (any_of(changes, is_changed)) gather(peers, doing);
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
      return c10::fmap(layouts, [](const auto& part) { return part.first; });
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
