#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ddp/detail/checkpoint_part.h>
#include <ddp/export.h>
#include <ddp/process_group.h>
#include <ddp/sharded_tensor.h>
#include <torch/arg.h>

namespace ddp {

/// Options for `Checkpointer`; every rank must pass the same.
struct CheckpointerOptions {
  /// How many finished checkpoints are kept, >= 0: a save removes older ones. 0 keeps all.
  /// Default: 3
  TORCH_ARG(int64_t, keep_last) = 3;
  /// maybe_save() saves at each step that this divides, >= 0. 0: not by steps. Default: 0
  TORCH_ARG(int64_t, every_steps) = 0;
  /// maybe_save() saves once this time has passed since the last save, by rank 0's clock. Costs a
  /// small collective in each call. 0: not by time. Default: 0
  TORCH_ARG(std::chrono::seconds, every) = std::chrono::seconds(0);
  /// Write while training continues, on a thread: save() returns after a copy in host memory.
  /// Default: true
  TORCH_ARG(bool, background) = true;
  /// Whether names that only the checkpoint or only the program has, and other dtypes, are errors.
  /// If not, a warning lists the names, and the values are converted. Default: true
  TORCH_ARG(bool, strict) = true;
  /// The ranks that save together. Default: the default group
  TORCH_ARG(GroupArg, process_group) = {};
};

/// Saves the whole state of a training run, and restores it bit for bit.
///
/// A checkpoint is a folder, `FOLDER/step-00000120`, that appears whole or not at all:
///
///   manifest.json           step, world size, versions, and size and CRC-32C of each file
///   model.pt, ...           one for each part; rank 0 writes them
///   rank-0.pt, rank-1.pt    each rank's own: random numbers, parts of `add_per_rank`
///   model.shard-00003.pt    rank 3's own boxes of a part of `add_sharded`: a dictionary of tensors
///
/// The file of a module or an optimizer without cut parameters is Python's: `torch.load(file,
/// weights_only=True)` is its `state_dict()` (see state_dict.h). All ranks see the same FOLDER, on
/// one host or on a file system that they share; one run at a time writes to it.
///
/// The states of the default generators (CPU and GPUs in use) and of the numbers of a
/// TensorParallelRng of every rank are always saved.
///
/// **Layers that are cut.** A model whose parameters are cut over ranks of process_group
/// (layouts_of()) is saved whole, by name, as a part of `add_sharded`: each rank writes its own
/// elements. So is the state of an optimizer of these parameters, which must be Adam, AdamW, SGD,
/// RMSprop or Adagrad, or one of these in a ZeroRedundancyOptimizer, and added to the Checkpointer
/// of its model. Both load on any number of ranks, cut in another way or whole. A model that is cut
/// loads the file of a run that had it whole, too; then each rank reads the whole.
///
/// **Another number of ranks.** Parts that the ranks share, such as a sampler's position, load on
/// any number of ranks, and so do parts of `add_sharded`, cut in any way. Rank r takes the random
/// numbers and the own parts of the saved rank r. A rank that the saved run did not have seeds its
/// generators from rank 0's seed, its number and the step, and leaves its own parts as they are.
///
/// **Errors.** One rank's error is every rank's: all throw the same text, before any state changes,
/// and no finished checkpoint is touched. An error of a background write is thrown by the next call
/// that communicates, and by `wait()`.
///
/// Thread safety: none; call it on the training loop's thread. Ownership: parts must outlive it.
///
/// Example:
/// ```
/// ddp::Checkpointer checkpointer(
///     "checkpoints", ddp::CheckpointerOptions().every_steps(1000));
/// checkpointer.add("model", model).add("optimizer", optimizer).add("sampler", sampler);
/// int64_t step = checkpointer.load_latest().value_or(0);
/// for (size_t epoch = sampler.epoch(); epoch < 10; ++epoch) {
///   sampler.set_epoch(epoch);
///   for (auto& batch : *loader) {
///     train(batch);
///     checkpointer.maybe_save(++step);
///   }
/// }
/// checkpointer.save(step);
/// checkpointer.wait();
/// ```
class DDP_API Checkpointer {
 public:
  /// Touches no file yet.
  ///
  /// \param folder  where it is relative, within the working folder of this moment.
  /// \throws c10::ValueError  an empty name, or a negative option. c10::Error  there is no default
  ///         group, and none is given.
  explicit Checkpointer(const std::string& folder, const CheckpointerOptions& options = {});
  /// Finishes an unfinished save: writes this rank's files, however long that takes, and waits at
  /// most a minute for the other ranks' files; at most two seconds while an exception unwinds the
  /// stack. A failure is a warning.
  ~Checkpointer();
  /// The moved-from object saves nothing from here on.
  Checkpointer(Checkpointer&&) noexcept;
  Checkpointer& operator=(Checkpointer&&) = delete;

  /// Adds a part that is the same on all ranks: rank 0's is saved, and every rank loads it. Every
  /// rank adds the same names.
  ///
  /// \param name  the part's file, without ".pt": letters, digits, '.', '_' and '-'.
  /// \param part  a module, its holder or a DistributedDataParallel; an optimizer (a
  ///        ZeroRedundancyOptimizer is gathered on rank 0); a scheduler of LibTorch; a tensor, a
  ///        number or a string; an at::Generator; or anything with
  ///        `save(torch::serialize::OutputArchive&)` and `load(torch::serialize::InputArchive&)`,
  ///        such as samplers. It must outlive this object. With an optimizer of parameters that are
  ///        cut over the ranks, add their model, too: it knows how they are cut.
  /// \throws c10::ValueError  a name that is taken or cannot be a file's; an empty module.
  template <typename T>
  Checkpointer& add(const std::string& name, T& part) {
    return add_part(name, detail::part_of(part), /*is_per_rank=*/false);
  }

  /// Adds a part of which each rank has its own: a generator, the residuals of a communication
  /// hook, a count of this rank's samples.
  template <typename T>
  Checkpointer& add_per_rank(const std::string& name, T& part) {
    return add_part(name, detail::part_of(part), /*is_per_rank=*/true);
  }

  /// Adds a part whose tensors are cut over the ranks, which loads on ranks that cut them in any
  /// other way. Every rank writes its own boxes, to FOLDER/step-.../NAME.shard-00003.pt on rank 3,
  /// and reads from these files the elements that it needs.
  ///
  /// \param name  as of add(); every rank adds it.
  /// \param shards  called on every rank at the begin of each save and load: what this rank has of
  ///        which tensors. At a save each element of a tensor must be in one box with replica 0. A
  ///        load writes into `local`, outside of autograd, once all ranks can.
  /// \throws c10::ValueError  as add(); an empty function.
  ///
  /// Cost: a save copies this rank's own boxes to host memory. The ranks exchange names, shapes and
  /// boxes (all_gather_strings) in the first save or load, and when one's have changed. A load
  /// takes host memory of this rank's boxes, and reads the files that have elements of them twice
  /// at most, once for the checksum.
  ///
  /// Example:
  /// ```
  /// // Rows of a weight [1024, 512], one part a rank:
  /// checkpointer.add_sharded("model", [&] {
  ///   return std::vector<ddp::ShardedTensor>{{"weight", {1024, 512}, {rank * rows, 0}, weight}};
  /// });
  /// ```
  Checkpointer& add_sharded(const std::string& name, ShardsCallback shards);

  /// Saves all parts under the number of a step, >= 0. Replaces a checkpoint of the same step, and
  /// removes the checkpoints that `load_latest` left out as damaged.
  ///
  /// Call it between two steps. Waits for the previous save if that is still being written.
  ///
  /// \throws c10::Error  this save cannot begin, as where the folder holds a later step, or the
  ///         previous save failed.
  ///
  /// Collective: yes. Blocks: host, until the state is copied; with background false, until it is
  ///   on the disk. Cost: a copy of the state in host memory, and four small gathers; five
  ///   with sharded parts.
  void save(int64_t step);

  /// Saves if the options say that it is time; never twice the same step, nor step 0.
  ///
  /// \return whether it saved, the same on all ranks.
  ///
  /// Collective: yes. Cost: nothing where no save is due and `every` is not set.
  bool maybe_save(int64_t step);

  /// Loads the newest checkpoint that is whole. For a newer one that is damaged or unfinished, a
  /// warning gives the reason why it is left out.
  ///
  /// \return its step; nothing where there is no checkpoint yet.
  /// \throws c10::Error  none is whole; or the newest does not fit the program: other names,
  ///         shapes or dtypes, another format.
  ///
  /// Collective: yes. Blocks: host. Cost: every rank reads the shared files twice.
  std::optional<int64_t> load_latest();

  /// Loads the checkpoint of this step.
  ///
  /// \throws c10::Error  there is none; it is damaged; it does not fit.
  ///
  /// Collective: yes.
  void load(int64_t step);

  /// Lists the steps of the finished checkpoints that this rank sees now, oldest first.
  std::vector<int64_t> steps() const;

  /// Waits until the last save is on the disk of all ranks.
  ///
  /// \throws c10::Error  it failed.
  ///
  /// Collective: yes.
  void wait();

  /// Saves and loads with the ranks of another group from now on, after ranks were lost or have
  /// joined. Drops a checkpoint that is still being written: it may lack a lost rank's files. After
  /// that, maybe_save() may save the same step again.
  ///
  /// \throws c10::Error  on every rank, where one cannot see the folder.
  ///
  /// Collective: yes, over `group`, whether the ranks are new or not.
  void rebind(const GroupArg& group = {});

 private:
  struct Impl;

  Checkpointer& add_part(const std::string& name, detail::CheckpointPartPtr part, bool is_per_rank);

  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
