#include "checkpointer/reading.h"

#include <optional>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/crc32c.h>
#include <ddp/internal/text.h>

#include <ddp/internal/random_state.h>
#include "checkpointer/save_job.h"
#include "files/folder.h"
#include "parts/cut_parts.h"
#include "python/torch_file.h"
#include "shards/shard_reader.h"

namespace ddp {
namespace {

constexpr const char* kRandom = "random";
constexpr const char* kParts = "parts";
constexpr const char* kFileSuffix = ".pt";

/// Reads the parts of a checkpoint that one rank loads.
class CheckpointReader {
 public:
  CheckpointReader(
      std::string folder, int64_t step, const std::vector<NamedPart>& parts,
      const std::vector<ShardedPart>& sharded, int rank, bool strict)
      : folder_(std::move(folder)),
        parts_(parts),
        sharded_(sharded),
        rank_(rank),
        strict_(strict),
        manifest_(read_manifest(folder_, step)) {}

  std::vector<PreparedLoad> read() {
    compare_names();
    for (const auto& named : parts_) {
      if (!named.is_per_rank) read_part(named);
    }
    for (const auto& part : sharded_) {
      if (part.is_read_elsewhere) continue;
      if (has_shards(part.name)) {
        loads_.push_back(prepare_shards(part, manifest_, folder_, strict_));
      } else if (part.has_copies) {
        read_whole(part);
      }
    }
    if (rank_ < manifest_.world_size) {
      read_own_file();
    } else {
      // The saved run had no such rank: this rank draws numbers of its own from now on.
      const auto first = read_file(rank_file(0));
      loads_.push_back(prepare_new_random_state(
          entry(first, kRandom), rank_, manifest_.step, subject_of(rank_file(0))));
    }
    return std::move(loads_);
  }

  /// Names the contents: equal for the same checkpoint, however many ranks read it.
  std::string contents() const {
    const auto json = to_json(manifest_);
    return hexadecimal(crc32c(0, json.data(), json.size()));
  }

 private:
  std::string subject_of(const std::string& file) const { return folder_ + "/" + file; }

  c10::IValue read_file(const std::string& file) const {
    check_file(folder_, manifest_, file);
    return read_torch_file(folder_ + "/" + file);
  }

  c10::IValue entry(const c10::IValue& dict, const char* key) const {
    const auto* value = find_in(dict, key);
    DDP_CHECK(
        value != nullptr, folder_, ": expected \"", key,
        "\" in the file of a rank, got none. Load another checkpoint.");
    return *value;
  }

  bool has_shards(const std::string& part) const { return manifest_.index.count(part) > 0; }

  void read_part(const NamedPart& named) {
    const auto file = part_file(named.name);
    if (manifest_.find(file) == nullptr) {
      if (named.part->module() != nullptr && has_shards(named.name)) read_cut_model(named);
      return;
    }
    detail::LoadContext context{strict_, subject_of(file)};
    std::optional<ShardReader> shards;
    auto part = named.part;
    if (has_shards(named.name)) {
      context.shards = &shards.emplace(named.name, manifest_, folder_);
      if (part->has_named_state()) {
        part = std::make_shared<detail::CutOptimizerPart>(
            part, [this] { return layouts_of_parts(parts_); });
      }
    }
    loads_.push_back(part->prepare(read_file(file), context));
  }

  /// Reads a model that this run has whole from the shards of a run that cut it.
  void read_cut_model(const NamedPart& named) {
    ShardedPart part{named.name, nullptr};
    part.shards = detail::shards_of_module(*named.part->module());
    part.tensors = tensors_of(texts_of_part(part.name), {shard_layouts_of(part.name, part.shards)});
    loads_.push_back(prepare_shards(part, manifest_, folder_, strict_));
  }

  /// Whether the checkpoint has a file with the whole part, and this rank can read it.
  bool is_read_whole(const ShardedPart& part) const {
    return part.whole && !has_shards(part.name) && manifest_.find(part_file(part.name)) != nullptr;
  }

  /// Reads a model from a file of a run that did not divide it.
  void read_whole(const ShardedPart& part) {
    const auto file = part_file(part.name);
    if (manifest_.find(file) == nullptr) return;
    const auto is_elsewhere = [&](const std::string& name) { return part.tensors.count(name) > 0; };
    loads_.push_back(
        part.whole->prepare(read_file(file), {strict_, subject_of(file), nullptr, is_elsewhere}));
  }

  void read_own_file() {
    const auto file = rank_file(rank_);
    const auto own = read_file(file);
    loads_.push_back(prepare_random_state(entry(own, kRandom), subject_of(file)));
    const auto saved = entry(own, kParts);
    std::vector<std::string> wanted, found;
    for (const auto& named : parts_) {
      if (!named.is_per_rank) continue;
      wanted.push_back(named.name);
      const auto* state = find_in(saved, named.name);
      if (state == nullptr) continue;
      const auto subject = ddp::str(subject_of(file), ", \"", named.name, '"');
      loads_.push_back(named.part->prepare(*state, {strict_, subject}));
    }
    for (const auto& item : saved.toGenericDict()) found.push_back(item.key().toStringRef());
    compare("parts of each rank", wanted, found);
  }

  void compare_names() {
    std::vector<std::string> wanted, found;
    for (const auto& named : parts_) {
      if (named.is_per_rank) continue;
      const auto file = part_file(named.name);
      const bool is_model = named.part->module() != nullptr;
      const bool is_cut = has_shards(named.name) && (is_model || named.part->has_named_state());
      if (is_cut) wanted.push_back(named.name + kShardInfix + "*.pt");
      if (!is_cut || !is_model) wanted.push_back(file);
    }
    for (const auto& file : manifest_.files) {
      const bool is_shard = file.name.find(kShardInfix) != std::string::npos;
      if (file.name.rfind("rank-", 0) != 0 && !is_shard) found.push_back(file.name);
    }
    const auto shard_files = [](const std::string& part) { return part + kShardInfix + "*.pt"; };
    for (const auto& part : sharded_) {
      if (!is_read_whole(part)) {
        wanted.push_back(shard_files(part.name));
      } else if (!part.is_read_elsewhere) {
        wanted.push_back(part_file(part.name));
      }
    }
    for (const auto& part : manifest_.index) found.push_back(shard_files(part.first));
    compare("files", wanted, found);
  }

  void compare(
      const char* what, const std::vector<std::string>& wanted,
      const std::vector<std::string>& found) {
    const auto missing = names_without(wanted, found);
    const auto additional = names_without(found, wanted);
    if (missing.empty() && additional.empty()) return;
    std::string text;
    if (!missing.empty()) text = "it lacks " + quoted_names(missing);
    if (!additional.empty()) {
      text +=
          ddp::str(text.empty() ? "" : ", and ", "it has ", quoted_names(additional), " besides");
    }
    DDP_CHECK(
        !strict_, folder_, ": expected the ", what, " of the parts that were added, but ", text,
        ". Add the parts that were saved, or load with strict(false).");
    loads_.push_back({[] {}, nullptr, ddp::str(folder_, ": ", text, ".")});
  }

  const std::string folder_;
  const std::vector<NamedPart>& parts_;
  const std::vector<ShardedPart>& sharded_;
  const int rank_;
  const bool strict_;
  const Manifest manifest_;
  std::vector<PreparedLoad> loads_;
};

}  // namespace

LayoutsByParameter layouts_of_parts(const std::vector<NamedPart>& parts, bool of_per_rank) {
  LayoutsByParameter layouts;
  for (const auto& named : parts) {
    const auto* module = named.is_per_rank == of_per_rank ? named.part->module() : nullptr;
    if (module != nullptr) add_layouts_of(*module, layouts);
  }
  return layouts;
}

std::string part_file(const std::string& name) { return name + kFileSuffix; }

c10::IValue state_of_rank(const std::vector<NamedPart>& parts) {
  auto own = make_dict();
  for (const auto& named : parts) {
    if (named.is_per_rank) own.insert(named.name, named.part->state());
  }
  return make_dict({{kRandom, random_state()}, {kParts, own}});
}

Reading read_checkpoint(
    const std::string& folder, int64_t step, const std::vector<NamedPart>& parts,
    const std::vector<ShardedPart>& sharded, int rank, bool strict) {
  Reading reading;
  try {
    CheckpointReader reader(folder, step, parts, sharded, rank, strict);
    reading.loads = reader.read();
    reading.text = reader.contents();
  } catch (const DamagedCheckpoint& damage) {
    reading.verdict = Reading::Verdict::Damaged;
    reading.text = damage.what();
  } catch (...) {
    reading.verdict = Reading::Verdict::Refused;
    reading.text = text_of(std::current_exception());
  }
  return reading;
}

}  // namespace ddp
