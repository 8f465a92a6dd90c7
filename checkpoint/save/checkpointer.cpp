#include <ddp/checkpointer.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <exception>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/packed_texts.h>
#include <ddp/internal/text.h>

#include <ddp/internal/file_io.h>
#include "files/folder.h"
#include "python/torch_file.h"
#include "save/peers.h"
#include "save/reading.h"
#include "save/save_job.h"
#include "save/sharded_parts.h"

namespace ddp {
namespace {

using std::chrono::steady_clock;

constexpr const char* kShareRemedy = ". Name a folder that all ranks share.";

ProcessGroup group_of(const CheckpointerOptions& options) {
  return options.process_group() ? options.process_group() : default_group();
}

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

std::string joined_steps(const std::vector<int64_t>& steps) {
  return steps.empty() ? "none" : joined_by(", ", steps);
}

/// Unpacks each rank's `Count` texts, and returns the texts of all ranks for each position.
template <size_t Count>
std::array<std::vector<std::string>, Count> texts_by_position(
    const std::vector<std::string>& ranks) {
  std::array<std::vector<std::string>, Count> places;
  for (const auto& rank : ranks) {
    const auto texts = unpacked(rank);
    for (size_t place = 0; place < Count; ++place) places[place].push_back(texts.at(place));
  }
  return places;
}

// Returns the first rank whose text differs from rank 0's; 0 for none.
size_t first_different_rank(const std::vector<std::string>& by_rank) {
  const auto is_other = [&](const std::string& text) { return text != by_rank.front(); };
  const auto found = std::find_if(by_rank.begin(), by_rank.end(), is_other);
  return found == by_rank.end() ? 0 : static_cast<size_t>(found - by_rank.begin());
}

}  // namespace

struct Checkpointer::Impl {
  Impl(std::string path, const CheckpointerOptions& given)
      : options(given), group(group_of(given)), folder(std::move(path)), peers(group) {}

  void save(int64_t step);
  bool is_due(int64_t step);
  void finish_save();
  std::vector<int64_t> agreed_steps();
  bool try_load(int64_t step, std::string* damage);
  void load_parts(Reading reading, int64_t step);
  std::string begin_save(int64_t step);
  void check_is_newest(int64_t step) const;
  void discard(const std::string& hidden) const;
  void gather_parts() const;
  SavePlan make_plan(int64_t step, const std::string& hidden);

  const CheckpointerOptions options;
  const ProcessGroup group;
  CheckpointFolder folder;
  CheckpointPeers peers;
  std::vector<NamedPart> parts;
  ShardedParts sharded;
  std::unique_ptr<SaveJob> job;  // all ranks have one, or none has
  int64_t job_step = -1;
  int64_t last_step = -1;              // that was saved or loaded
  std::vector<int64_t> damaged_steps;  // left out by load_latest(); the next save removes them
  steady_clock::time_point last_time = steady_clock::now();
};

// Throws the errors of the unfinished save, on every rank.
void Checkpointer::Impl::finish_save() {
  if (!job) return;
  const auto ended = std::exchange(job, nullptr);
  const auto doing = ddp::str("saving step ", job_step);
  peers.agree(ended->wait_for_files(), doing);
  peers.agree(ended->wait_for_end(), doing);
  damaged_steps.clear();  // a save that fails may not have removed them
}

// Makes, on rank 0, the folder that all ranks write to. Returns its name.
std::string Checkpointer::Impl::begin_save(int64_t step) {
  const auto doing = ddp::str("saving step ", step);
  std::string call = ddp::str("step ", step, " of");
  for (const auto& named : parts) call += ddp::str(" \"", named.name, '"');
  for (const auto& part : sharded.all()) call += ddp::str(" \"", part.name, "\" (sharded)");
  std::string hidden;
  const auto problem = problem_of([&] {
    DDP_CHECK_VALUE(step >= 0, "save: expected a step >= 0, got ", step, ". Count from 0.");
    sharded.refresh();
    if (peers.rank() != 0) return;
    check_is_newest(step);
    hidden = folder.begin(step);
  });
  const auto problem_of_ranks = [&](const std::vector<std::string>& by_rank) {
    const auto [calls, folders, problems, changes] = texts_by_position<4>(by_rank);
    const auto rank = first_different_rank(calls);
    if (rank == 0) return describe_problems(problems, doing);
    return ddp::str(
        "Checkpointer: expected every rank to save the same step and parts, but rank 0 saves ",
        calls.front(), " and rank ", rank, " ", calls[rank],
        ". Add the same parts and make the same calls on every rank.");
  };
  try {
    const auto agreed =
        peers.agree(packed({call, hidden, problem, sharded.change()}), doing, problem_of_ranks);
    sharded.exchange(peers, texts_by_position<4>(agreed)[3], doing);
    const auto misfit = problem_of([&] { sharded.index(); });
    if (!misfit.empty()) peers.throw_agreed(misfit);
    return unpacked(agreed.front())[1];
  } catch (...) {
    discard(hidden);
    throw;
  }
}

// A later checkpoint, of another run or from before a load, would count as the newest in
// load_latest().
void Checkpointer::Impl::check_is_newest(int64_t step) const {
  auto steps = folder.finished_steps();
  const auto is_damaged = [&](int64_t s) {
    return std::find(damaged_steps.begin(), damaged_steps.end(), s) != damaged_steps.end();
  };
  steps.erase(std::remove_if(steps.begin(), steps.end(), is_damaged), steps.end());
  DDP_CHECK_VALUE(
      steps.empty() || steps.back() <= step, folder.path(), ": expected no checkpoint after step ",
      step, ", got one of step ", steps.back(),
      ". Load it before, remove those that are not wanted, or name another folder.");
}

// Removes the folder that rank 0 made for a save that failed to begin.
void Checkpointer::Impl::discard(const std::string& hidden) const {
  if (peers.rank() != 0 || hidden.empty()) return;
  problem_of([&] { remove_path(folder.path_of(hidden)); });
}

// Gathers parts that are divided among ranks. A failed connection fails on all of them.
void Checkpointer::Impl::gather_parts() const {
  for (const auto& named : parts) {
    if (!named.is_per_rank) named.part->gather(group);
  }
}

SavePlan Checkpointer::Impl::make_plan(int64_t step, const std::string& hidden) {
  DDP_CHECK(
      kind_of_path(folder.path_of(hidden)) == PathKind::Folder, "expected to find ",
      folder.path_of(hidden), ", which rank 0 made, got nothing", kShareRemedy);
  SavePlan plan{folder,        hidden, step, peers.rank(), peers.size(), options.keep_last(),
                damaged_steps, {}};
  if (plan.rank == 0) {
    for (const auto& named : parts) {
      if (named.is_per_rank) continue;
      plan.files.emplace_back(part_file(named.name), copy_to_host(named.part->state()));
    }
  }
  for (const auto& part : sharded.all()) {
    auto shards = copy_written_shards(part.shards);
    if (shards.toGenericDict().empty()) continue;
    plan.files.emplace_back(shard_file(part.name, plan.rank), std::move(shards));
  }
  if (plan.rank == 0) plan.index = sharded.index();
  plan.files.emplace_back(rank_file(plan.rank), copy_to_host(state_of_rank(parts)));
  return plan;
}

void Checkpointer::Impl::save(int64_t step) {
  finish_save();
  const auto drop_shards = c10::make_scope_exit([this] { sharded.release(); });
  const auto hidden = begin_save(step);
  std::optional<SavePlan> plan;
  try {
    gather_parts();
    const auto problem = problem_of([&] { plan = make_plan(step, hidden); });
    peers.agree(problem, ddp::str("saving step ", step));
  } catch (...) {
    discard(hidden);
    throw;
  }
  job = std::make_unique<SaveJob>(std::move(*plan));
  job_step = step;
  last_step = step;
  last_time = steady_clock::now();
  if (!options.background()) finish_save();
}

bool Checkpointer::Impl::is_due(int64_t step) {
  if (step <= 0 || step == last_step) return false;
  if (options.every_steps() > 0 && step % options.every_steps() == 0) return true;
  if (options.every().count() <= 0) return false;
  const bool is_over = steady_clock::now() - last_time >= options.every();
  return peers.gather(is_over ? "1" : "", "asking rank 0 for the time").front() == "1";
}

// Returns the steps that all ranks see; throws where ranks see different ones.
std::vector<int64_t> Checkpointer::Impl::agreed_steps() {
  const std::string doing = "listing the checkpoints";
  std::vector<int64_t> steps;
  const auto problem = problem_of([&] {
    steps = folder.steps();
    sharded.refresh();
  });
  const auto agreed = peers.agree(
      packed({joined_steps(steps), folder.path(), problem, sharded.change()}), doing,
      [&](const std::vector<std::string>& by_rank) {
        const auto [seen, folders, problems, changes] = texts_by_position<4>(by_rank);
        auto text = describe_problems(problems, doing);
        const auto rank = first_different_rank(seen);
        if (!text.empty() || rank == 0) return text;
        return ddp::str(
            "Checkpointer: expected every rank to see the same checkpoints, but rank 0 sees ",
            seen.front(), " in ", folders.front(), " and rank ", rank, " of ", peers.size(),
            " sees ", seen[rank], " in ", folders[rank], kShareRemedy);
      });
  sharded.exchange(peers, texts_by_position<4>(agreed)[3], doing);
  return steps;
}

// Applies a checkpoint; changes no state if any rank cannot.
void Checkpointer::Impl::load_parts(Reading reading, int64_t step) {
  const auto doing = ddp::str("loading step ", step);
  std::vector<PreparedLoad*> tried;
  const auto problem = problem_of([&] {
    for (auto& load : reading.loads) {
      if (!load.undo) continue;
      tried.push_back(&load);
      load.apply();
    }
  });
  try {
    peers.agree(problem, doing);
  } catch (...) {
    for (auto* load : tried) problem_of([&] { load->undo(); });
    throw;
  }
  peers.agree(
      problem_of([&] {
        for (auto& load : reading.loads) {
          if (!load.undo) load.apply();
        }
      }),
      doing);
  for (const auto& load : reading.loads) {
    if (peers.rank() == 0 && !load.notice.empty()) TORCH_WARN("Checkpointer: ", load.notice);
  }
  last_step = step;
  last_time = steady_clock::now();
}

// Returns false where a rank finds the checkpoint damaged, with the reason in `damage`.
bool Checkpointer::Impl::try_load(int64_t step, std::string* damage) {
  const auto doing = ddp::str("loading step ", step);
  auto reading = read_checkpoint(
      folder.path_of(step), step, parts, sharded.all(), peers.rank(), options.strict());
  damage->clear();
  peers.agree(
      packed(
          {std::string(1, static_cast<char>(reading.verdict)), folder.path_of(step), reading.text}),
      doing, [&](const std::vector<std::string>& by_rank) {
        const auto [verdicts, folders, texts] = texts_by_position<3>(by_rank);
        std::vector<std::string> refusals;
        for (size_t rank = 0; rank < verdicts.size(); ++rank) {
          const auto verdict = static_cast<Reading::Verdict>(verdicts[rank].front());
          refusals.push_back(verdict == Reading::Verdict::Refused ? texts[rank] : "");
          if (verdict == Reading::Verdict::Damaged && damage->empty()) *damage = texts[rank];
        }
        auto text = describe_problems(refusals, doing);
        const auto rank = first_different_rank(texts);
        if (!text.empty() || !damage->empty() || rank == 0) return text;
        return ddp::str(
            "Checkpointer: expected every rank to see the same checkpoint of step ", step,
            ", but rank 0 sees one in ", folders.front(), " and rank ", rank, " of ", peers.size(),
            " another in ", folders[rank], kShareRemedy);
      });
  if (!damage->empty()) return false;
  load_parts(std::move(reading), step);
  return true;
}

Checkpointer::Checkpointer(std::string folder, const CheckpointerOptions& options) {
  DDP_CHECK_VALUE(
      !folder.empty(), "Checkpointer: expected the name of a folder, got \"\". Name one.");
  DDP_CHECK_VALUE(
      options.keep_last() >= 0 && options.every_steps() >= 0 && options.every().count() >= 0,
      "CheckpointerOptions: expected keep_last, every_steps and every >= 0, got ",
      options.keep_last(), ", ", options.every_steps(), " and ", options.every().count(),
      " s. Leave out what is not wanted.");
  impl_ = std::make_unique<Impl>(std::move(folder), options);
}

Checkpointer::~Checkpointer() {
  if (!impl_ || !impl_->job) return;
  constexpr std::chrono::seconds kLong(60);
  constexpr std::chrono::seconds kShort(2);
  auto& job = *impl_->job;
  job.wait_for_files();
  const bool ended = job.ends_within(std::uncaught_exceptions() > 0 ? kShort : kLong);
  if (!ended) job.cancel();
  const auto error = job.wait_for_end();
  if (!error.empty()) TORCH_WARN("Checkpointer: ", error, " Call wait() to have it thrown.");
}

Checkpointer::Checkpointer(Checkpointer&&) noexcept = default;

Checkpointer& Checkpointer::add_part(
    const std::string& name, detail::CheckpointPartPtr part, bool is_per_rank) {
  check_name(name, impl_->parts, impl_->sharded);
  impl_->parts.push_back({name, std::move(part), is_per_rank});
  return *this;
}

Checkpointer& Checkpointer::add_sharded(const std::string& name, ShardsCallback shards) {
  DDP_CHECK_VALUE(
      shards != nullptr,
      "Checkpointer::add_sharded: expected a callback, got an empty function. Pass one.");
  check_name(name, impl_->parts, impl_->sharded);
  impl_->sharded.add(name, std::move(shards));
  return *this;
}

void Checkpointer::save(int64_t step) { impl_->save(step); }

bool Checkpointer::maybe_save(int64_t step) {
  if (!impl_->is_due(step)) return false;
  impl_->save(step);
  return true;
}

std::optional<int64_t> Checkpointer::load_latest() {
  const auto drop_shards = c10::make_scope_exit([this] { impl_->sharded.release(); });
  impl_->finish_save();
  const auto steps = impl_->agreed_steps();
  impl_->damaged_steps.clear();
  if (steps.empty()) return std::nullopt;
  std::string damages;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::string damage;
    if (impl_->try_load(*step, &damage)) return *step;
    impl_->damaged_steps.push_back(*step);
    damages += ddp::str(damages.empty() ? "" : "; ", damage);
    if (impl_->peers.rank() == 0) TORCH_WARN("Checkpointer: left out step ", *step, ": ", damage);
  }
  impl_->peers.throw_agreed(ddp::str(
      "Checkpointer: expected a whole checkpoint in ", impl_->folder.path(),
      ", got none: ", damages, ". Remove them to begin anew."));
}

void Checkpointer::load(int64_t step) {
  const auto drop_shards = c10::make_scope_exit([this] { impl_->sharded.release(); });
  impl_->finish_save();
  const auto steps = impl_->agreed_steps();
  if (std::find(steps.begin(), steps.end(), step) == steps.end()) {
    impl_->peers.throw_agreed(ddp::str(
        "Checkpointer: expected a checkpoint of step ", step, " in ", impl_->folder.path(),
        ", got ", joined_steps(steps), ". Load one of these."));
  }
  std::string damage;
  if (!impl_->try_load(step, &damage)) {
    impl_->peers.throw_agreed(ddp::str(
        "Checkpointer: expected step ", step, " to be whole, but ", damage, ". Load another."));
  }
}

std::vector<int64_t> Checkpointer::steps() const { return impl_->folder.finished_steps(); }

void Checkpointer::wait() { impl_->finish_save(); }

}  // namespace ddp
