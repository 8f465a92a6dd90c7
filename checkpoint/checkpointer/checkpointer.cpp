#include <ddp/checkpointer.h>

#include <cctype>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "checkpointer/checkpointed_run.h"
#include "checkpointer/cut_parts_of_run.h"
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
          name.find(kShardInfix) == std::string::npos && all_of(name, is_allowed),
      "Checkpointer::add: expected a name of 1 to 100 letters, digits, '.', '_' and '-' that does "
      "not begin with '.' or \"rank-\", nor have \".shard-\", got \"",
      name, "\". Choose another.");
  const auto is_taken =
      sharded.contains(name) || any_of(parts, [&](const NamedPart& p) { return p.name == name; });
  DDP_CHECK_VALUE(
      !is_taken, "Checkpointer::add: expected each name once, got \"", name,
      "\" again. Choose another.");
}

std::string joined_steps(const std::vector<int64_t>& steps) {
  return steps.empty() ? "none" : joined_by(", ", steps);
}

// Returns the steps that all ranks see; throws where ranks see different ones.
std::vector<int64_t> agreed_steps(CheckpointedRun& run) {
  const std::string doing = "listing the checkpoints";
  std::vector<int64_t> steps;
  const auto misfit = divide_cut_parts(run, doing);
  const auto problem = problem_of([&] {
    DDP_CHECK_VALUE(misfit.empty(), misfit);
    // A pretended rank has saved nothing, and what lies there may be of a real job.
    if (!is_pretended()) {
      run.folder.restore_replaced();
      steps = run.folder.steps();
    }
    run.sharded.refresh();
  });
  const auto agreed = run.peers.agree(
      packed({joined_steps(steps), run.folder.path(), problem, run.sharded.change()}), doing,
      [&](const std::vector<std::string>& by_rank) {
        const auto [seen, folders, problems, changes] = texts_by_position<4>(by_rank);
        auto text = describe_problems(problems, doing);
        const auto rank = first_different_rank(seen);
        if (!text.empty() || rank == 0) return text;
        return ddp::str(
            "Checkpointer: expected every rank to see the same checkpoints, but rank 0 sees ",
            seen.front(), " in ", folders.front(), " and rank ", rank, " of ", run.peers.size(),
            " sees ", seen[rank], " in ", folders[rank], kShareRemedy);
      });
  run.sharded.exchange(run.peers, texts_by_position<4>(agreed)[3], doing);
  return steps;
}

// Applies a checkpoint; changes no state if any rank cannot.
void load_parts(CheckpointedRun& run, Reading reading, const std::string& doing) {
  std::vector<PreparedLoad*> tried;
  const auto problem = problem_of([&] {
    for (auto& load : reading.loads) {
      if (!load.undo) continue;
      tried.push_back(&load);
      load.apply();
    }
  });
  try {
    run.peers.agree(problem, doing);
  } catch (...) {
    for (auto* load : tried) problem_of([&] { load->undo(); });
    throw;
  }
  run.peers.agree(
      problem_of([&] {
        for (auto& load : reading.loads) {
          if (!load.undo) load.apply();
        }
      }),
      doing);
  for (const auto& load : reading.loads) {
    if (run.peers.rank() == 0 && !load.notice.empty()) TORCH_WARN("Checkpointer: ", load.notice);
  }
}

// Returns why a rank finds the checkpoint damaged; "" where all ranks have loaded it.
std::string try_load(CheckpointedRun& run, int64_t step) {
  const auto doing = ddp::str("loading step ", step);
  const auto path = run.folder.path_of(step);
  auto reading = read_checkpoint(
      path, step, run.parts, run.sharded.all(), run.peers.rank(), run.options.strict());
  std::string damage;
  run.peers.agree(
      packed({std::string(1, static_cast<char>(reading.verdict)), path, reading.text}), doing,
      [&](const std::vector<std::string>& by_rank) {
        const auto [verdicts, folders, texts] = texts_by_position<3>(by_rank);
        std::vector<std::string> refusals;
        for (size_t rank = 0; rank < verdicts.size(); ++rank) {
          const auto verdict = static_cast<Reading::Verdict>(verdicts[rank].front());
          refusals.push_back(verdict == Reading::Verdict::Refused ? texts[rank] : "");
          if (verdict == Reading::Verdict::Damaged && damage.empty()) damage = texts[rank];
        }
        auto text = describe_problems(refusals, doing);
        const auto rank = first_different_rank(texts);
        if (!text.empty() || !damage.empty() || rank == 0) return text;
        return ddp::str(
            "Checkpointer: expected every rank to see the same checkpoint of step ", step,
            ", but rank 0 sees one in ", folders.front(), " and rank ", rank, " of ",
            run.peers.size(), " another in ", folders[rank], kShareRemedy);
      });
  if (damage.empty()) load_parts(run, std::move(reading), doing);
  return damage;
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
  auto& [run, saving] = *impl_;
  const auto drop_shards = c10::make_scope_exit([&run = run] { run.sharded.release(); });
  saving.finish();
  const auto steps = agreed_steps(run);
  std::vector<int64_t> damaged;
  saving.set_damaged(damaged);
  if (steps.empty()) return std::nullopt;
  std::string damages;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const auto damage = try_load(run, *step);
    if (damage.empty()) {
      saving.continue_from(*step);
      return *step;
    }
    damaged.push_back(*step);
    saving.set_damaged(damaged);
    damages += ddp::str(damages.empty() ? "" : "; ", damage);
    if (run.peers.rank() == 0) TORCH_WARN("Checkpointer: left out step ", *step, ": ", damage);
  }
  run.peers.throw_agreed(ddp::str(
      "Checkpointer: expected a whole checkpoint in ", run.folder.path(), ", got none: ", damages,
      ". Remove them to begin anew."));
}

void Checkpointer::load(int64_t step) {
  auto& [run, saving] = *impl_;
  const auto drop_shards = c10::make_scope_exit([&run = run] { run.sharded.release(); });
  saving.finish();
  const auto steps = agreed_steps(run);
  if (!contains(steps, step)) {
    run.peers.throw_agreed(ddp::str(
        "Checkpointer: expected a checkpoint of step ", step, " in ", run.folder.path(), ", got ",
        joined_steps(steps),
        is_pretended() ? ". A pretended rank saves and reads no files: begin without a checkpoint."
                       : ". Load one of these."));
  }
  const auto damage = try_load(run, step);
  if (!damage.empty()) {
    run.peers.throw_agreed(ddp::str(
        "Checkpointer: expected step ", step, " to be whole, but ", damage, ". Load another."));
  }
  saving.continue_from(step);
}

std::vector<int64_t> Checkpointer::steps() const {
  if (is_pretended()) return {};
  return impl_->run.folder.finished_steps();
}

void Checkpointer::wait() { impl_->saving.finish(); }

void Checkpointer::rebind(const GroupArg& group) {
  impl_->run.rebind(group.get());
  impl_->saving.restart();
}

}  // namespace ddp
