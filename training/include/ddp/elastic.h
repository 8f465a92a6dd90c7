#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ddp/checkpointer.h>
#include <ddp/detail/elastic_part.h>
#include <ddp/elastic_errors.h>
#include <ddp/export.h>
#include <ddp/grad_scaler.h>
#include <ddp/process_group.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

namespace ddp {

/// Options for `Elastic`; every rank must pass the same.
struct ElasticOptions {
  /// Backend and timeout of each generation's group. The backend must carry CPU tensors: "shm",
  /// "gloo", "cpu:gloo,cuda:nccl". Default: shm
  TORCH_ARG(ProcessGroupOptions, group_options) = {};

 public:
  /// An older name of group_options.
  ElasticOptions& group(ProcessGroupOptions options) { return group_options(std::move(options)); }
  /// As group_options().
  const ProcessGroupOptions& group() const { return group_options_; }
  /// As group_options().
  ProcessGroupOptions& group() { return group_options_; }
  /// The job's coordinator, "HOST:PORT/TOKEN". Default: DDP_COORDINATOR, which `ddprun --elastic`
  /// sets; without it the world is fixed, and a failure ends the program
  TORCH_ARG(std::string, coordinator) = "";
  /// Of the default generators, which are seeded at the begin of each turn from this, the slot and
  /// the step, so that a repeated turn draws the same numbers. -1: leave them alone. Default: 0
  TORCH_ARG(int64_t, seed) = 0;
  /// Signals on which this rank leaves after its turn, as by leave(). Default: none
  TORCH_ARG(std::vector<int>, leave_on) = {};
  /// Steps from one snapshot to the next, in a run with a ZeroRedundancyOptimizer: at most so many
  /// are repeated after a loss. Default: 100
  TORCH_ARG(int64_t, snapshot_every) = 100;
  /// Compare a hash of all parts on all ranks before the first turn of each generation.
  /// Default: true
  TORCH_ARG(bool, verify) = true;
  /// Whether a generation's group becomes the default group. False where ranks are threads of one
  /// process. Default: true
  TORCH_ARG(bool, sets_default_group) = true;
};

/// The ranks that train together until one is lost, leaves or joins. Then comes the next one.
struct ElasticGeneration {
  int64_t number = 0;       ///< from 1; 0 in a fixed world
  int rank = 0;             ///< of this process
  int size = 1;             ///< how many ranks there are
  int slot = 0;             ///< the launcher's number of this process, which keeps it
  std::vector<int> slots;   ///< of all ranks, by rank
  std::vector<int> lost;    ///< slots whose processes were lost, or left, since the last generation
  std::vector<int> joined;  ///< slots whose processes are new
  int64_t steps = 0;        ///< finished before it began
  int64_t repeated = 0;     ///< steps that this rank repeats: 0 or 1; more with snapshots
  double seconds = 0;       ///< from the end of the last generation's turn to this one's first
  std::string why;          ///< the last generation ended
};
/// An older name of ElasticGeneration.
using Generation = ElasticGeneration;

/// Trains on when ranks are lost and when ranks join, without starting anything anew.
///
/// The processes that are left keep their models and optimizers. They repeat at most the step in
/// which a rank was lost; a fresh process that takes the lost rank's place gets the whole state
/// from their memory. Afterwards all ranks are equal to the bit, and each sample of an epoch is
/// used once.
///
/// Start it with `ddprun --elastic`. Where nothing else is said (`--min-ranks`), the others wait
/// for the replacement, and the run ends with the bits of a run without failures.
///
/// **Turns.** loop() calls a function again and again: a turn. All that changes with a step
/// (optimizer, scheduler, an average of weights) changes in step(), once a turn, after the averaged
/// backward pass. When a turn fails because a rank was lost, what it changed before is undone, and
/// it is repeated. Where step() was reached on some ranks, the step counts, and the others take
/// their state. Other code may use a turn's results after step(); a failure there skips the rest.
///
/// **Parts.** All that a turn changes has to be added, under the same names on every rank. A part
/// with a `rebind(group)`, such as wrappers, samplers and averagers, follows the ranks. Elsewhere,
/// ask default_group() each time: a group ends with its generation.
///
/// **ZeroRedundancyOptimizer** (no overlap). A lost rank's part is nowhere else, so every
/// `snapshot_every` steps each rank copies its state to host memory, and its part to a rank of the
/// next host, or the next rank. After a loss all go back to the last copy. Ranks that join or leave
/// cost no step. A rank and the one that keeps its copy, lost at once: the last checkpoint.
///
/// **GPUs.** Over NCCL, which may abort a collective without a word, step() and the end of a turn
/// wait for the device: its collectives have ended on all ranks, or the turn is repeated.
///
/// Not for other modules whose parameters are cut over ranks, for LBFGS and for captured steps.
///
/// Thread safety: none; use it on the training loop's thread. One thread of its own talks to the
/// coordinator. Ownership: parts must outlive it.
///
/// Example:
/// ```
/// ddp::Elastic run;  // was: ddp::init_process_group()
/// Net net;
/// ddp::DistributedDataParallel model(net);
/// torch::optim::AdamW optimizer(model->parameters(), 1e-3);
/// ddp::BatchStream batches(*loader, sampler, /*epochs=*/10);
/// run.add("model", model).add("optimizer", optimizer).add("batches", batches).loop([&] {
///   auto batch = batches.next();
///   if (!batch) return false;
///   optimizer.zero_grad();
///   torch::nll_loss(model->forward(batch->data), batch->target).backward();
///   run.step(optimizer);  // was: optimizer.step()
///   return true;
/// });
/// ```
class DDP_API Elastic {
 public:
  /// Takes the place of init_process_group. Meets all ranks. A process that joins ranks that train
  /// does not wait for them here: until loop(), every other rank of its default group answers as
  /// this process would.
  ///
  /// \throws  as init_process_group. QuorumLost  the coordinator cannot be reached.
  ///
  /// Collective: yes. Blocks: host.
  explicit Elastic(const ElasticOptions& options = {});
  /// Leaves the job, and destroys the default group where this made it. While an exception unwinds
  /// the stack, the others lose this rank.
  ~Elastic();
  C10_DISABLE_COPY_AND_ASSIGN(Elastic);

  /// Adds a part that is the same on all ranks.
  ///
  /// \param name, part  as of Checkpointer::add.
  /// \throws c10::ValueError  also a ZeroRedundancyOptimizer with overlap, an LBFGS, and
  ///         a module with parameters that are cut over ranks.
  template <typename T>
  Elastic& add(const std::string& name, T& part) {
    return add_part(
        name, detail::part_of(part), detail::elastic_hooks_of(part), /*is_per_rank=*/false);
  }

  /// Adds a part of which each rank has its own: the residuals of a communication hook, a
  /// generator. A rank keeps its own; a new process has it as it was constructed.
  template <typename T>
  Elastic& add_per_rank(const std::string& name, T& part) {
    return add_part(
        name, detail::part_of(part), detail::elastic_hooks_of(part), /*is_per_rank=*/true);
  }

  /// Loads the latest checkpoint where no rank has the state, and saves between turns by the
  /// checkpointer's options. A save that a loss interrupted is made again at the same step.
  Elastic& checkpoints(Checkpointer& checkpointer);

  /// Has `act` called on every rank of each generation before its first turn: also of the first
  /// one. For what depends on the ranks, such as further groups.
  Elastic& on_change(std::function<void(const ElasticGeneration&)> act);

  /// Calls `turn` until it returns false, which it must do on all ranks in the same turn, before it
  /// changes anything. Returns once all ranks are done, or after leave().
  ///
  /// \throws Fenced, QuorumLost  see there. Any other exception of `turn`: the others lose this
  ///         rank, with its text.
  void loop(const std::function<bool()>& turn);

  /// Takes a step. Where the turn's collectives have failed, it throws RankLost, and nothing
  /// changes. With parameters on a device whose stream waits for collectives, as NCCL's, all ranks
  /// exchange 4 bytes before it.
  ///
  /// Collective: yes, over such a backend. Blocks: then the host, until the gradients are there.
  /// \throws c10::Error  a second time in a turn, or not in a turn.
  void step(torch::optim::Optimizer& optimizer);
  /// The same, with `scaler.step(optimizer)` and `scaler.update()`.
  void step(GradScaler& scaler, torch::optim::Optimizer& optimizer);
  /// \param apply  changes all that changes with a step. It must not communicate. An exception of
  ///        it leaves the state torn: this rank leaves the job.
  void step(const std::function<void()>& apply);

  /// How many steps the job has finished, over all generations.
  int64_t steps() const;
  /// The present generation.
  ElasticGeneration generation() const;
  /// Its group.
  ProcessGroup process_group() const;
  /// Whether this process has joined ranks that train, and has no state yet.
  bool is_newcomer() const;
  /// Leaves the job after this turn: the others go on without this rank, and repeat nothing.
  void leave();

  /// What loop() is made of, for a program with a loop of its own:
  /// ```
  /// run.enter();
  /// for (bool is_over = false; !is_over;) {
  ///   try {
  ///     while (has_more()) { run.begin_turn(); ...; run.step(optimizer); }
  ///     run.finish();
  ///     is_over = true;
  ///   } catch (const ddp::RankLost&) {
  ///     run.recover();
  ///   }
  /// }
  /// ```
  /// `has_more()` must not change anything.
  void enter();
  /// Ends the turn before, lets ranks join and leave, and saves. \return false after leave().
  bool begin_turn();
  /// Undoes a turn that failed, and waits for the next generation.
  void recover();
  /// Waits until all ranks are done. \throws RankLost  others need this rank's state: recover().
  void finish();

 private:
  struct Impl;

  Elastic& add_part(
      const std::string& name, detail::CheckpointPartPtr state, detail::ElasticHooks hooks,
      bool is_per_rank);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
