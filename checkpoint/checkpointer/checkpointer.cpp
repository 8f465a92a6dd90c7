#include <ddp/checkpointer.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>

#include "checkpointer/checkpointed_run.h"
#include "checkpointer/loading.h"
#include "checkpointer/saving.h"

namespace ddp {
namespace {

void check_name(
    const std::string& name, const std::vector<NamedPart>& parts, const ShardedParts& sharded) {
  const auto is_allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '.' || c == '_' || c == '-';
  };
  DDP_CHECK_VALUE(
      !name.empty() && name.size() <= 100 && name.front() != '.' && name.rfind("rank-", 0) != 0 &&
          name.find(kShardInfix) == std::string::npos &&
          std::all_of(name.begin(), name.end(), is_allowed),
      "Checkpointer::add: expected a name of 1 to 100 letters, digits, '.', '_' and '-' that does "
      "not begin with '.' or \"rank-\", nor have \".shard-\", got \"",
      name, "\". Choose another.");
  const auto is_taken =
      sharded.contains(name) ||
      std::any_of(parts.begin(), parts.end(), [&](const NamedPart& p) { return p.name == name; });
  DDP_CHECK_VALUE(
      !is_taken, "Checkpointer::add: expected each name once, got \"", name,
      "\" again. Choose another.");
}

}  // namespace

struct Checkpointer::Impl {
  Impl(std::string folder, const CheckpointerOptions& options)
      : run(std::move(folder), options), saving(run) {}

  CheckpointedRun run;
  Saving saving;
};

Checkpointer::Checkpointer(const std::string& folder, const CheckpointerOptions& options) {
  DDP_CHECK_VALUE(
      !folder.empty(), "Checkpointer: expected the name of a folder, got \"\". Name one.");
  DDP_CHECK_VALUE(
      options.keep_last() >= 0 && options.every_steps() >= 0 && options.every().count() >= 0,
      "CheckpointerOptions: expected keep_last, every_steps and every >= 0, got ",
      options.keep_last(), ", ", options.every_steps(), " and ", options.every().count(),
      " s. Leave out what is not wanted.");
  impl_ = std::make_unique<Impl>(absolute_path(folder), options);
}

Checkpointer::~Checkpointer() = default;

Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

Checkpointer& Checkpointer::add_part(
    const std::string& name, detail::CheckpointPartPtr part, bool is_per_rank) {
  auto& run = impl_->run;
  check_name(name, run.parts, run.sharded);
  run.parts.push_back({name, std::move(part), is_per_rank});
  return *this;
}

Checkpointer& Checkpointer::add_sharded(const std::string& name, ShardsCallback shards) {
  auto& run = impl_->run;
  DDP_CHECK_VALUE(
      shards != nullptr,
      "Checkpointer::add_sharded: expected a callback, got an empty function. Pass one.");
  check_name(name, run.parts, run.sharded);
  run.sharded.add(name, std::move(shards));
  return *this;
}

void Checkpointer::save(int64_t step) { impl_->saving.save(step); }

bool Checkpointer::maybe_save(int64_t step) {
  if (!impl_->saving.is_due(step)) return false;
  impl_->saving.save(step);
  return true;
}

std::optional<int64_t> Checkpointer::load_latest() {
  return ddp::load_latest(impl_->run, impl_->saving);
}

void Checkpointer::load(int64_t step) { load_step(impl_->run, impl_->saving, step); }

std::vector<int64_t> Checkpointer::steps() const { return impl_->run.folder.finished_steps(); }

void Checkpointer::wait() { impl_->saving.finish(); }

void Checkpointer::rebind(const GroupArg& group) {
  impl_->run.rebind(group.get());
  impl_->saving.restart();
}

}  // namespace ddp
