#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpointer/checkpointed_run.h"
#include "checkpointer/save_job.h"

namespace ddp {

/// The saves of a Checkpointer: whether one is due, and the one that is still being written.
class Saving {
 public:
  /// \param run  outlives this.
  explicit Saving(CheckpointedRun& run) : run_(run) {}
  /// Waits for the unfinished save as ~Checkpointer() says.
  ~Saving();
  C10_DISABLE_COPY_AND_ASSIGN(Saving);

  void save(int64_t step);
  /// Whether maybe_save() saves this step, the same on every rank.
  ///
  /// Collective: with options().every().
  bool is_due(int64_t step);
  /// Waits for the unfinished save; throws its errors, on every rank.
  void finish();

  /// The run has other ranks: drops an unfinished save.
  ///
  /// Collective: yes, over them.
  void restart();

  void continue_from(int64_t step);
  /// Sets the steps of damaged checkpoints, which the next save removes and which do not count as
  /// newer ones.
  void set_damaged(std::vector<int64_t> steps) { damaged_steps_ = std::move(steps); }

 private:
  std::string begin(int64_t step);
  void check_is_newest(int64_t step) const;
  void discard(const std::string& hidden) const;
  void gather_parts() const;
  void exchange_shards(int64_t step);
  SavePlan make_plan(int64_t step, const std::string& hidden);

  CheckpointedRun& run_;
  std::unique_ptr<SaveJob> job_;  // all ranks have one, or none has
  bool saves_nowhere_ = false;    // in place of a job, in a pretended rank
  int64_t job_step_ = -1;
  int64_t last_step_ = -1;  // that was saved or loaded
  std::vector<int64_t> damaged_steps_;
  std::chrono::steady_clock::time_point last_time_ = std::chrono::steady_clock::now();
};

}  // namespace ddp
