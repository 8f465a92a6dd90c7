#include "checkpointer/saving.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <ddp/internal/check.h>
#include <ddp/internal/file_io.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "checkpointer/cut_parts_of_run.h"
#include "python/torch_file.h"

namespace ddp {

using std::chrono::steady_clock;

Saving::~Saving() {
  if (!job_) return;
  constexpr std::chrono::seconds kLong(60);
  constexpr std::chrono::seconds kShort(2);
  job_->wait_for_files();
  const bool ended = job_->ends_within(std::uncaught_exceptions() > 0 ? kShort : kLong);
  if (!ended) job_->cancel();
  const auto error = job_->wait_for_end();
  if (!error.empty()) TORCH_WARN("Checkpointer: ", error, " Call wait() to have it thrown.");
}

void Saving::finish() {
  if (!job_ && !saves_nowhere_) return;
  saves_nowhere_ = false;
  const auto ended = std::exchange(job_, nullptr);
  const auto doing = ddp::str("saving step ", job_step_);
  run_.peers.agree(ended ? ended->wait_for_files() : "", doing);
  run_.peers.agree(ended ? ended->wait_for_end() : "", doing);
  damaged_steps_.clear();  // a save that fails may not have removed them
}

// Reads from the folder whether the last save is whole, because a lost rank may have been rank 0,
// which ends saves. By then no remaining rank writes to the folder. New ranks take the last step
// from the old ones, so that all ranks find the same saves due.
void Saving::restart() {
  constexpr const char* kDoing = "going on with other ranks";
  if (const auto job = std::exchange(job_, nullptr)) {
    job->cancel();
    job->wait_for_end();
  }
  int64_t last = -1;
  for (const auto& text : run_.peers.gather(ddp::str(last_step_), kDoing)) {
    int64_t step = -1;
    InputText(text) >> step;
    last = std::max(last, step);
  }
  bool is_whole = false;
  const auto problem = problem_of([&] {
    if (last < 0 || run_.peers.rank() != 0) return;
    is_whole = contains(run_.folder.finished_steps(), last);
  });
  const auto agreed = run_.peers.agree_without(problem, is_whole ? "whole" : "", kDoing);
  last_step_ = agreed.front().empty() ? -1 : last;
}

// Makes, on rank 0, the folder that all ranks write to. Returns its name.
std::string Saving::begin(int64_t step) {
  const auto doing = ddp::str("saving step ", step);
  const auto misfit = divide_cut_parts(run_, doing);
  std::string call = ddp::str("step ", step, " of");
  for (const auto& named : run_.parts) call += ddp::str(" \"", named.name, '"');
  for (const auto& part : run_.sharded.all()) call += ddp::str(" \"", part.name, "\" (sharded)");
  std::string hidden;
  const auto problem = problem_of([&] {
    DDP_CHECK_VALUE(step >= 0, "save: expected a step >= 0, got ", step, ". Count from 0.");
    DDP_CHECK_VALUE(misfit.empty(), misfit);
    if (run_.peers.rank() != 0 || is_pretended()) return;
    check_is_newest(step);
    hidden = run_.folder.begin(step);
  });
  const auto problem_of_ranks = [&](const std::vector<std::string>& by_rank) {
    const auto [calls, folders, problems] = texts_by_position<3>(by_rank);
    const auto rank = first_different_rank(calls);
    if (rank == 0) return describe_problems(problems, doing);
    return ddp::str(
        "Checkpointer: expected every rank to save the same step and parts, but rank 0 saves ",
        calls.front(), " and rank ", rank, " ", calls[rank],
        ". Add the same parts and make the same calls on every rank.");
  };
  try {
    const auto agreed = run_.peers.agree(packed({call, hidden, problem}), doing, problem_of_ranks);
    return unpacked(agreed.front())[1];
  } catch (...) {
    discard(hidden);
    throw;
  }
}

// A later checkpoint, of another run or from before a load, would count as the newest in
// load_latest().
void Saving::check_is_newest(int64_t step) const {
  auto steps = run_.folder.finished_steps();
  drop_if(steps, [&](int64_t s) { return contains(damaged_steps_, s); });
  DDP_CHECK_VALUE(
      steps.empty() || steps.back() <= step, run_.folder.path(),
      ": expected no checkpoint after step ", step, ", got one of step ", steps.back(),
      ". Load it before, remove those that are not wanted, or name another folder.");
}

// Removes the folder that rank 0 made for a save that failed to begin.
void Saving::discard(const std::string& hidden) const {
  if (run_.peers.rank() != 0 || hidden.empty()) return;
  problem_of([&] { remove_path(run_.folder.path_of(hidden)); });
}

// Gathers parts that are divided among ranks. A failed connection fails on all of them.
void Saving::gather_parts() const {
  for (const auto& named : run_.parts) {
    if (!named.is_per_rank) named.part->gather(run_.group, detail::CheckpointPart::States::OfFirst);
  }
}

// Tells all ranks who writes which shard.
void Saving::exchange_shards(int64_t step) {
  auto& sharded = run_.sharded;
  if (sharded.all().empty()) return;
  const auto doing = ddp::str("saving step ", step);
  const auto problem = problem_of([&] { sharded.refresh(); });
  sharded.exchange(run_.peers, run_.peers.agree_without(problem, sharded.change(), doing), doing);
  if (is_pretended()) return;  // the other ranks seem to have this one's shards
  const auto misfit = problem_of([&] { sharded.index(); });
  if (!misfit.empty()) run_.peers.throw_agreed(misfit);
}

SavePlan Saving::make_plan(int64_t step, const std::string& hidden) {
  const auto& folder = run_.folder;
  DDP_CHECK(
      is_pretended() || kind_of_path(folder.path_of(hidden)) == PathKind::Folder,
      "expected to find ", folder.path_of(hidden), ", which rank 0 made, got nothing",
      kShareRemedy);
  SavePlan plan{
      folder,         hidden, step, run_.peers.rank(), run_.peers.size(), run_.options.keep_last(),
      damaged_steps_, {}};
  TensorsOnHost copies;
  if (plan.rank == 0) {
    for (const auto& named : run_.parts) {
      if (named.is_per_rank) continue;
      plan.files.emplace_back(part_file(named.name), copy_to_host(named.part->state(), copies));
    }
  }
  for (const auto& part : run_.sharded.all()) {
    auto shards = copy_written_shards(part.shards, copies);
    if (shards.toGenericDict().empty()) continue;
    plan.files.emplace_back(shard_file(part.name, plan.rank), std::move(shards));
  }
  if (plan.rank == 0 && !is_pretended()) plan.index = run_.sharded.index();
  plan.files.emplace_back(rank_file(plan.rank), copy_to_host(state_of_rank(run_.parts), copies));
  copies.wait();  // once: then the program may change what is saved
  return plan;
}

void Saving::save(int64_t step) {
  finish();
  monitor_of(run_.group)->settle_job();
  const auto drop_shards = c10::make_scope_exit([this] { run_.sharded.release(); });
  const auto hidden = begin(step);
  std::optional<SavePlan> plan;
  try {
    gather_parts();
    exchange_shards(step);
    const auto problem = problem_of([&] { plan = make_plan(step, hidden); });
    run_.peers.agree(problem, ddp::str("saving step ", step));
  } catch (...) {
    discard(hidden);
    throw;
  }
  saves_nowhere_ = is_pretended();
  if (!saves_nowhere_) job_ = std::make_unique<SaveJob>(std::move(*plan));
  job_step_ = step;
  continue_from(step);
  if (!run_.options.background()) finish();
}

void Saving::continue_from(int64_t step) {
  last_step_ = step;
  last_time_ = steady_clock::now();
}

bool Saving::is_due(int64_t step) {
  const auto& options = run_.options;
  if (step <= 0 || step == last_step_) return false;
  if (options.every_steps() > 0 && step % options.every_steps() == 0) return true;
  if (options.every().count() <= 0) return false;
  const bool is_over = steady_clock::now() - last_time_ >= options.every();
  return run_.peers.gather(is_over ? "1" : "", "asking rank 0 for the time").front() == "1";
}

}  // namespace ddp
