#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <ddp/detail/prefetch_pass.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/export.h>
#include <ddp/main_first.h>
#include <ddp/prefetch.h>
#include <ddp/process_group.h>
#include <ddp/sampler.h>
#include <torch/arg.h>
#include <torch/data/dataloader.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/output-archive.h>

namespace ddp {

/// Options for `prepare`; the same on every rank, but for `workers` and `device`.
///
/// Example:
/// ```
/// auto options = ddp::PrepareOptions().batch_size(64).seed(1).max_norm(1.0);
/// ```
struct PrepareOptions {
  /// The number of samples of a batch, of all ranks together: a multiple of the number of ranks.
  /// Default: none, it has to be set
  TORCH_ARG(int64_t, batch_size) = 0;
  /// The seed of the order of the samples, and of each rank's default generators, as of
  /// `seed_all()` after the net is wrapped. Default: unset, 0 for the order, and the generators go
  /// on as they are
  TORCH_ARG(std::optional<int64_t>, seed) = {};
  /// How many batches make a step, >= 1: their gradients are added up on each rank, and averaged
  /// with those of the last one. Default: 1
  TORCH_ARG(int64_t, accumulate) = 1;
  /// `step()` scales the gradients so that their norm is at most this, above 0. Default: unset
  TORCH_ARG(std::optional<double>, max_norm) = {};
  /// Draw a new order in each epoch instead of 0, 1, 2, ... Default: true
  TORCH_ARG(bool, shuffle) = true;
  /// Leave out what does not fill a batch at the end of an epoch. False: the last batch is smaller,
  /// and repeats up to `ranks - 1` samples, so that all ranks have equally many. Default: false
  TORCH_ARG(bool, drop_last) = false;
  /// Threads that draw batches ahead of the loop, >= 0: those of `make_prefetch_loader`, of which
  /// one at a time reads the data set. 0: the loop's thread does. Default: 0
  TORCH_ARG(int64_t, workers) = 0;
  /// The device of the batches that the loop gets; at least one worker copies them there.
  /// Default: unset, they stay where they are
  TORCH_ARG(std::optional<c10::Device>, device) = {};
  /// The ranks to train with. Default: the wrapper's, else the default group
  TORCH_ARG(GroupArg, process_group) = {};
  /// Options of the wrapper. Default: DistributedDataParallel's defaults
  TORCH_ARG(DistributedDataParallelOptions, wrapper) = {};
};

namespace detail {

struct PreparedState;

/// One loop over an epoch, which counts its batches. While it lives and no other has begun, it is
/// the loop that `backward`, `step` and `gather_for_metrics` belong to.
class DDP_API PreparedPass {
 public:
  /// Before the loader begins.
  PreparedPass(std::shared_ptr<PreparedState> state, int64_t epoch);
  ~PreparedPass();
  C10_DISABLE_COPY_AND_ASSIGN(PreparedPass);

  /// After the loader has begun, which decides where in the epoch this is.
  void loader_has_begun();
  /// The loop gets the next batch.
  void next();
  /// The loop is over, or another one has begun.
  void end();

  /// Samples of the present batch, and of all batches of its step, on this rank.
  int64_t rows() const;
  int64_t rows_of_step() const;
  /// How many of the present batch's rows, of all ranks together, repeat samples.
  int64_t repeated() const;
  /// Whether the present batch is the first or the last of its step.
  bool begins_step() const;
  bool ends_step() const;
  bool is_in_batch() const { return batch_ >= 0; }

 private:
  std::shared_ptr<PreparedState> state_;
  int64_t samples_ = 0;  // that this rank draws
  int64_t batches_ = 0;
  int64_t padding_ = 0;  // repeated samples, of all ranks together
  int64_t batch_ = -1;   // the number of the present one
};

DDP_API DistributedDataParallelOptions wrapper_options(const PrepareOptions& options);

}  // namespace detail

/// The part of `Prepared` that depends on neither the net nor the data set.
class DDP_API PreparedBase {
 public:
  /// Clears the gradients that the optimizer steps on; within the batches of a step that
  /// accumulates, only before the first one's `backward`. Works at the beginning of the loop's body
  /// as well as after `step()`.
  ///
  /// Collective: no.
  void zero_grad();

  /// `loss.backward()`. With `accumulate(n)`, the gradients of a step's batches add up to those of
  /// the mean over all their samples: the loss, a mean over the batch, is divided by n, and in a
  /// last step of fewer samples weighted by the batch's share of them.
  ///
  /// \param loss  a tensor of one element, from `model()->forward`.
  /// \throws c10::Error  with accumulate(n), outside of a loop over `loader()`.
  ///
  /// Collective: yes, but in batches that do not end a step: as the wrapper's backward pass.
  void backward(const at::Tensor& loss);

  /// Clips the gradients by `max_norm`, and steps the optimizer. In a batch that does not end a
  /// step it does nothing.
  /// ```
  /// if (run.step()) scheduler.step();
  /// ```
  /// Clipped is by the norm of all gradients of the net, or with a ZeroRedundancyOptimizer of all
  /// that it steps on. For an optimizer that needs no closure.
  ///
  /// \return whether the optimizer has made a step.
  /// \throws c10::Error  with accumulate(n), outside of a loop over `loader()`; as
  ///         clip_grad_norm_(), and as the optimizer.
  ///
  /// Collective: as clip_grad_norm_() and the optimizer's step.
  bool step();

  /// Whether the present batch ends a step: the one in which `step()` acts, and with whose
  /// `backward` the ranks average. False outside of a loop over `loader()`.
  bool ends_step() const;

  /// The mean of `value` over the ranks, as `ddp::average`.
  ///
  /// Collective: yes. Blocks: host.
  double average(double value) const;
  /// The same of several values in one collective.
  std::map<std::string, double> average(const std::map<std::string, double>& values) const;

  /// Gathers the present batch's results of all ranks, on every rank, each sample's once: without
  /// those of samples that an epoch's last batch repeats. The rows are in the order of the epoch,
  /// as of one process that draws batches of `batch_size` samples; without `shuffle`, in that of
  /// the data set.
  /// ```
  /// correct += run.gather_for_metrics(output.argmax(1) == batch.target).sum().item<int64_t>();
  /// ```
  /// \param tensor  [rows of this rank's batch, ...], of equal dtype on all ranks.
  /// \return  [rows of all ranks, ...], without a graph. Over an epoch, as many rows as the data
  ///         set has samples (with drop_last, those that fill batches).
  /// \throws c10::ValueError  for another number of rows. c10::Error  outside of a loop over
  ///         `loader()`.
  ///
  /// Collective: yes. Cost: an all-gather, and a copy.
  at::Tensor gather_for_metrics(const at::Tensor& tensor) const;

  /// Whether this is rank 0 of the group: the one that prints.
  bool is_main() const;

  /// How many times `step()` acts in a whole epoch: for schedules of the learning rate.
  int64_t steps_per_epoch() const;

  /// The sampler of the loader, to save and load (a `Checkpointer` does it), and for
  /// `check_dataset()`. Saved in the loop's body, its position is after the present batch, also
  /// with workers. After `load`, `loader(sampler().epoch())` gives the rest of that epoch.
  DistributedSampler& sampler();

 protected:
  /// See `prepare`.
  PreparedBase(
      std::shared_ptr<DistributedDataParallelBase> model, torch::optim::Optimizer& optimizer,
      std::optional<size_t> dataset_size, const PrepareOptions& options);
  /// Before a loop.
  PreparedBase(PreparedBase&&) = default;
  ~PreparedBase() = default;

  /// How this rank's loader draws.
  torch::data::DataLoaderOptions loader_options() const;
  /// The ranks that train together.
  const ProcessGroup& group() const;
  /// What its loops and it share.
  const std::shared_ptr<detail::PreparedState>& state() const { return state_; }

 private:
  const detail::PreparedPass& pass_for(const char* call) const;

  std::shared_ptr<detail::PreparedState> state_;
};

/// A net, an optimizer and a data set, ready to train on all ranks of a group; see `prepare`.
///
/// It is the wrapper, the sampler and the loader of a loop written by hand, and what such a loop
/// says of them. A program that needs anything else takes `model()` and `sampler()`, and writes
/// that part by hand.
///
/// Ownership: the optimizer must outlive it, and it its loops. It can be moved before a loop.
/// Thread safety: none. It does not follow changes of the ranks: for `Elastic`, write the loop by
/// hand.
///
/// \tparam M  what the wrapper holds, as of DistributedDataParallel.
/// \tparam Dataset  the data set.
template <typename M, typename Dataset>
class Prepared : public PreparedBase {
  static_assert(
      !Dataset::is_stateful,
      "prepare: expected a data set that loads by index, whose samples the ranks can share. Train "
      "on a stateful one by a loop of your own.");
  using Loader = torch::data::StatelessDataLoader<Dataset, DistributedSampler>;
  using Ahead = PrefetchLoader<Loader*>;

 public:
  /// The wrapper.
  using Model = DistributedDataParallel<M>;
  /// What the loop gets.
  using Batch = typename Dataset::BatchType;

  /// This rank's batches of one epoch, for a loop.
  class Epoch {
   public:
    /// As of torch::data's loaders.
    using Iterator = torch::data::Iterator<Batch>;

    /// See `loader`.
    Epoch(std::shared_ptr<detail::PreparedState> state, Loader& loader, Ahead* ahead, int64_t epoch)
        : state_(std::move(state)), loader_(loader), ahead_(ahead), epoch_(epoch) {}

    /// Begins the epoch. An iterator that another begin() has given before is of no use then.
    Iterator begin() { return ahead_ ? begin_at(*ahead_) : begin_at(loader_); }
    /// What begin()'s iterator equals after the last batch.
    Iterator end() {
      return Iterator(std::make_unique<torch::data::detail::SentinelIterator<Batch>>());
    }

   private:
    template <typename From>
    Iterator begin_at(From& from) {
      auto pass = std::make_shared<detail::PreparedPass>(state_, epoch_);
      auto position = from.begin();
      pass->loader_has_begun();
      return Iterator(std::make_unique<torch::data::detail::ValidIterator<Batch>>(
          [pass = std::move(pass), position = std::move(position), last = from.end(),
           begun = false]() mutable -> std::optional<Batch> {
            if (std::exchange(begun, true)) ++position;
            if (position == last) {
              pass->end();
              return std::nullopt;
            }
            pass->next();
            return detail::batch_at<Batch>(position);
          }));
    }

    std::shared_ptr<detail::PreparedState> state_;
    Loader& loader_;
    Ahead* ahead_;
    int64_t epoch_;
  };

  /// See `prepare`.
  Prepared(
      Model model, torch::optim::Optimizer& optimizer, Dataset dataset,
      const PrepareOptions& options)
      : PreparedBase(model.ptr(), optimizer, dataset.size(), options),
        model_(std::move(model)),
        loader_(torch::data::make_data_loader(std::move(dataset), sampler(), loader_options())) {
    if (options.workers() == 0 && !options.device()) return;
    ahead_ = make_prefetch_loader(
        loader_.get(), PrefetchOptions()
                           .workers(std::max<int64_t>(options.workers(), 1))
                           .device(options.device()));
  }
  /// Before a loop.
  Prepared(Prepared&&) = default;

  /// The wrapper: `run.model()->forward(batch.data)`. The net is `run.model()->module()`.
  Model& model() { return model_; }

  /// This rank's batches of that epoch, in the order that the seed and the epoch decide: it calls
  /// `set_epoch`.
  /// ```
  /// for (auto& batch : run.loader(epoch)) { ... }
  /// ```
  /// The loop may end early, on all ranks after the same batch.
  ///
  /// \param epoch  from 0, the same on every rank.
  ///
  /// Collective: no.
  Epoch loader(int64_t epoch) { return Epoch(state(), *loader_, ahead_.get(), epoch); }

  /// Rank 0 writes the net without the wrapper: a file for `torch::load(net, path)`, or of a
  /// TorchScript module one for `torch::jit::load(path)`. Other ranks return once it is complete.
  /// For a training that goes on later use a `Checkpointer`.
  ///
  /// \throws c10::Error  on every rank, where rank 0 could not write it.
  ///
  /// Collective: yes. Blocks: host.
  void save(const std::string& path) const {
    const auto write = [&] {
      if constexpr (std::is_same_v<M, torch::jit::Module>) {
        model_->module().save(path);
      } else {
        torch::serialize::OutputArchive archive;
        model_->save(archive);
        archive.save_to(path);
      }
    };
    main_first(
        [&] {
          if (is_main()) write();
        },
        group());
  }

 private:
  Model model_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<Ahead> ahead_;  // after the loader, which it draws from; null without workers
};

/// Prepares the ordinary loop in one call: wraps the net, gives each rank its share of the data
/// set, and seeds.
///
/// ```
/// ddp::init_process_group();
/// Net net;
/// torch::optim::SGD optimizer(net->parameters(), 0.1);
/// auto run = ddp::prepare(
///     net, optimizer, dataset, ddp::PrepareOptions().batch_size(64).seed(1));
/// for (int epoch = 0; epoch < 3; ++epoch) {
///   double sum = 0;
///   for (auto& batch : run.loader(epoch)) {
///     run.zero_grad();
///     auto loss = torch::nll_loss(run.model()->forward(batch.data), batch.target);
///     run.backward(loss);
///     run.step();
///     sum += loss.item<double>();
///   }
///   double mean = run.average(sum);
///   if (run.is_main()) std::cout << mean << '\n';
/// }
/// ```
/// All that it does can be written by hand, with the same bits: docs/prepare.md shows both.
///
/// \param net  a holder, a std::shared_ptr to a module, or a torch::jit::Module, on the device
///        where it computes.
/// \param optimizer  of the net's parameters; it must outlive what is returned.
/// \param dataset  of LibTorch's kinds that load by index, with a size(); with a Stack transform or
///        without. The same on every rank.
/// \throws c10::Error  with the same text on every rank: an option out of its range, a batch_size
///         that the ranks cannot share, a data set without a size, an optimizer of other
///         parameters; ranks with different options or sizes; and as DistributedDataParallel.
///
/// Collective: yes. Blocks: host. Cost: as DistributedDataParallel's construction.
/// Source: accelerate.Accelerator.prepare, with gather_for_metrics, accumulate and clipping.
template <typename M, typename Dataset>
Prepared<M, Dataset> prepare(
    M net, torch::optim::Optimizer& optimizer, Dataset dataset, const PrepareOptions& options) {
  return Prepared<M, Dataset>(
      DistributedDataParallel<M>(std::move(net), detail::wrapper_options(options)), optimizer,
      std::move(dataset), options);
}

/// The same with a model that is wrapped already, whose group and options hold: for an optimizer
/// that is made of the wrapper, as a ZeroRedundancyOptimizer.
template <typename M, typename Dataset>
Prepared<M, Dataset> prepare(
    DistributedDataParallel<M> model, torch::optim::Optimizer& optimizer, Dataset dataset,
    const PrepareOptions& options) {
  return Prepared<M, Dataset>(std::move(model), optimizer, std::move(dataset), options);
}

}  // namespace ddp
