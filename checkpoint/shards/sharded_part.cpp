#include "shards/sharded_part.h"

#include <tuple>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/check.h>
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
  std::string names;
  if (!missing.empty()) names = "the checkpoint lacks the program's " + quoted_names(missing);
  if (!additional.empty()) {
    names += ddp::str(
        names.empty() ? "" : "; ", "the program lacks the checkpoint's ", quoted_names(additional));
  }
  DDP_CHECK_VALUE(
      !strict || names.empty(), subject, ": expected the program's names, but ", names,
      ". Build the model as it was saved, or load it with strict(false).");
  return names;
}

}  // namespace

void number_copies(std::vector<std::vector<ShardLayout>>& ranks) {
  using Place = std::tuple<std::string, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Place, int64_t> copies;
  for (auto& shards : ranks) {
    for (auto& shard : shards) {
      shard.replica = copies[{shard.name, shard.box.offset, shard.box.size}]++;
    }
  }
}

c10::IValue copy_written_shards(const std::vector<ShardedTensor>& shards) {
  const c10::NoGradGuard no_grad;
  auto dict = make_dict();
  for (const auto& shard : shards) {
    const Box box{shard.offset, shard.local.sizes().vec()};
    if (shard.replica != 0 || c10::multiply_integers(box.size) == 0) continue;
    // Row by row, whatever the strides: ranges of it are read.
    auto copy = at::empty(box.size, shard.local.scalar_type());
    copy.copy_(shard.local);
    dict.insert(shard_key(shard.name, box), copy);
  }
  return dict;
}

namespace {

// A load that wrote into a temporary tensor of the callback would be lost without a word.
void check_can_be_written(const ShardedTensor& shard, const std::string& subject) {
  const auto& local = shard.local;
  if (local.numel() == 0) return;
  const bool is_temporary = local.use_count() == 1 && local.storage().use_count() == 1 &&
                            local.storage().allocator() != nullptr;
  DDP_CHECK_VALUE(
      !is_temporary, subject,
      ": expected tensors that a load can write into, got a temporary one "
      "for ",
      shard.name, ". Return the model's tensor, or a view of it.");
  DDP_CHECK_VALUE(
      at::has_internal_overlap(local) != at::MemOverlap::Yes && !local.is_inference(), subject,
      ": expected tensors that a load can write into, got an expanded or an inference tensor for ",
      shard.name, ". Return one with memory for each element.");
}

}  // namespace

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
    const Box own{shard.offset, shard.local.sizes().vec()};
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

}  // namespace ddp
