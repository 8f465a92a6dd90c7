#include <ddp/consolidate_checkpoint.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/prepared_load.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "checkpointer/reading.h"
#include "files/folder.h"
#include "parts/cut_parts.h"
#include "python/torch_file.h"
#include "shards/shard_reader.h"
#include "tensors/tensor_file.h"
#include "tensors/write_tensors.h"

namespace ddp {
namespace {

constexpr const char* kConsolidate = "consolidate_checkpoint";
constexpr size_t kCopiedBytes = size_t{1} << 20;  // of a file that is copied as it is

/// A part of a checkpoint, as one file.
class Consolidation {
 public:
  /// \throws DamagedCheckpoint  the manifest is not whole.
  Consolidation(std::string folder, int64_t step, const ConsolidateOptions& options)
      : folder_(std::move(folder)), options_(options), manifest_(read_manifest(folder_, step)) {
    has_file_ = manifest_.find(part_file(options_.part())) != nullptr;
    if (manifest_.index.count(options_.part()) > 0) {
      shards_.emplace(options_.part(), manifest_, folder_);
    }
    DDP_CHECK(
        has_file_ || shards_, kConsolidate, ": expected a part \"", options_.part(), "\" in ",
        folder_, ", got ", quoted_names(names_of_parts()), ". Name one of these.");
  }

  /// \throws DamagedCheckpoint  a file of the part is not whole.
  void check() {
    std::set<std::string> files;
    if (shards_) {
      for (const auto& [name, tensor] : shards_->index()) {
        for (const auto& box : tensor.boxes) files.insert(box.file);
      }
    }
    const auto count = files.size() + (has_file_ ? 1 : 0);
    size_t number = 0;
    const auto report_check = [&](const std::string& file) {
      report(ddp::str("checking ", folder_, "/", file, " (", ++number, " of ", count, ")"));
    };
    for (const auto& file : files) {
      report_check(file);
      shards_->check(file);
    }
    if (!has_file_) return;
    report_check(part_file(options_.part()));
    check_file(folder_, manifest_, part_file(options_.part()));
  }

  void write(const std::string& path) {
    const bool as_safetensors = is_safetensors(path);
    if (!shards_ && !as_safetensors) return copy(path);
    DDP_CHECK_VALUE(
        !shards_ || !has_file_ || !as_safetensors, kConsolidate,
        ": expected tensors by name for a file of safetensors, got the state of an optimizer in "
        "part \"",
        options_.part(), "\". Name a file that ends with .pt.");
    if (shards_ && has_file_) return write_optimizer(path);
    const auto whole = shards_ ? nullptr : open_tensor_file(file_path());
    const auto source = shards_ ? source_of_shards() : source_of_file(*whole);
    if (as_safetensors) {
      write_safetensors(source, {{"format", "pt"}}, path);
    } else {
      write_torch_tensors(source, path);
    }
  }

 private:
  std::string file_path() const { return folder_ + "/" + part_file(options_.part()); }

  void report(const std::string& line) const {
    if (options_.progress()) options_.progress()(line);
  }

  void report_write(const NamedKind& tensor, size_t number, size_t count) const {
    report(ddp::str(
        "writing ", tensor.name, " ", kind_text(tensor.kind), " (", number, " of ", count, ")"));
  }

  std::vector<std::string> names_of_parts() const {
    std::set<std::string> names;
    for (const auto& part : manifest_.index) names.insert(part.first);
    const auto suffix = part_file("");
    for (const auto& file : manifest_.files) {
      if (file.name.rfind("rank-", 0) == 0 || file.name.find(kShardInfix) != std::string::npos) {
        continue;
      }
      names.insert(file.name.substr(0, file.name.size() - suffix.size()));
    }
    return {names.begin(), names.end()};
  }

  at::Tensor read(const IndexedTensor& saved) {
    auto tensor = at::empty(saved.kind.sizes, saved.kind.dtype);
    shards_->add(saved, whole_box(saved.kind.sizes), tensor);
    shards_->read();
    return tensor;
  }

  TensorSource source_of_shards() {
    TensorSource source;
    std::vector<const IndexedTensor*> saved;
    std::set<std::string> others;
    for (const auto& [name, tensor] : shards_->index()) {
      const auto first = source.tensors.size();
      const auto add = [&, &tensor = tensor](const std::string& one) {
        source.tensors.push_back({one, tensor.kind});
        source.same_as.push_back(first);
        saved.push_back(&tensor);
      };
      add(name);
      for (const auto& other : tensor.other_names) {
        if (shards_->index().count(other) == 0 && others.insert(other).second) add(other);
      }
    }
    source.read = [this, saved = std::move(saved), tensors = source.tensors](size_t i) {
      report_write(tensors[i], i + 1, tensors.size());
      return read(*saved[i]);
    };
    return source;
  }

  TensorSource source_of_file(TensorFile& file) {
    TensorSource source;
    source.tensors = file.tensors();
    source.read = [this, &file](size_t i) {
      report_write(file.tensors()[i], i + 1, file.tensors().size());
      return file.read(i, whole_box(file.tensors()[i].kind.sizes));
    };
    return source;
  }

  // The state's tensors are among the shards, and their names in the file.
  void write_optimizer(const std::string& path) {
    const auto names = read_torch_file(file_path());
    DDP_CHECK(
        detail::has_state(names), file_path(),
        ": expected the state of an optimizer, got another value. Load another checkpoint.");
    DDP_CHECK_VALUE(
        find_in(names, detail::kByName) == nullptr, kConsolidate,
        ": expected an optimizer of whole models, got that of a pipeline in part \"",
        options_.part(), "\". Load it with a Checkpointer: its state goes by names.");
    LazyTensors lazy;
    size_t number = 0;
    const auto& index = shards_->index();
    const auto filled = detail::replace_in_state(
        names,
        [&](size_t /*index*/, const c10::IValue& /*field*/,
            const c10::IValue& value) -> c10::IValue {
          const auto saved = value.isString() ? index.find(value.toStringRef()) : index.end();
          if (saved == index.end()) return value;
          return lazy.add(saved->second.kind, [&, saved] {
            report_write({saved->first, saved->second.kind}, ++number, index.size());
            return read(saved->second);
          });
        });
    replace_torch_file(
        path, [&] { return filled; }, &lazy);
  }

  // Python reads it as it is.
  void copy(const std::string& path) const {
    report(ddp::str("copying ", file_path()));
    const InputFile from(file_path());
    std::vector<char> block(kCopiedBytes);
    replace_file(path, [&](OutputFile& file) {
      for (uint64_t at = 0; at < from.size(); at += block.size()) {
        block.resize(std::min<uint64_t>(from.size() - at, kCopiedBytes));
        from.read(at, block.data(), block.size());
        file.write(block.data(), block.size());
      }
    });
  }

  const std::string folder_;
  const ConsolidateOptions options_;
  const Manifest manifest_;
  bool has_file_ = false;  // with the whole part, or with all but the tensors of a cut optimizer
  std::optional<ShardReader> shards_;
};

int64_t consolidate_newest(
    const CheckpointFolder& folder, const std::string& file, const ConsolidateOptions& options) {
  auto steps = folder.steps();
  DDP_CHECK(
      !steps.empty(), kConsolidate, ": expected a folder of checkpoints, got none in ",
      folder.path(), ". Name the folder of a Checkpointer.");
  std::string damages;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    try {
      Consolidation consolidation(folder.path_of(*step), *step, options);
      consolidation.check();
      consolidation.write(file);
      return *step;
    } catch (const DamagedCheckpoint& damage) {
      if (options.progress())
        options.progress()(ddp::str("left out step ", *step, ": ", damage.what()));
      damages += ddp::str(damages.empty() ? "" : "; ", damage.what());
    }
  }
  DDP_CHECK(
      false, kConsolidate, ": expected a whole checkpoint in ", folder.path(),
      ", got none: ", damages, ". Copy it again.");
  return -1;
}

}  // namespace

int64_t consolidate_checkpoint(
    const std::string& path, std::optional<int64_t> step, const std::string& file,
    const ConsolidateOptions& options) {
  const CheckpointFolder folder(path);
  if (!step) return consolidate_newest(folder, file, options);
  const auto steps = folder.steps();
  DDP_CHECK(
      contains(steps, *step), kConsolidate, ": expected a checkpoint of step ", *step, " in ", path,
      ", got ", steps.empty() ? "none" : joined_by(", ", steps), ". Name one of these.");
  try {
    Consolidation consolidation(folder.path_of(*step), *step, options);
    consolidation.check();
    consolidation.write(file);
  } catch (const DamagedCheckpoint& damage) {
    DDP_CHECK(
        false, kConsolidate, ": expected step ", *step, " to be whole, but ", damage.what(),
        ". Name another step, or copy it again.");
  }
  return *step;
}

}  // namespace ddp
