#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/Type.h>
#include <ddp/detail/prefetch_pass.h>
#include <torch/arg.h>
#include <torch/data/iterator.h>

namespace ddp {

/// Options for `make_prefetch_loader`.
///
/// Example:
/// ```
/// auto options = ddp::PrefetchOptions().workers(2).device(torch::kCUDA);
/// ```
struct PrefetchOptions {
  /// Threads that transform batches and copy them to the device, >= 1. Default: 1
  TORCH_ARG(int64_t, workers) = 1;
  /// The most batches that are drawn ahead of the loop, including those that workers still prepare,
  /// >= 1. Below `workers`, only `depth` threads are started. Default: workers + 1
  TORCH_ARG(std::optional<int64_t>, depth) = {};
  /// The device of the batches that the loop gets. Without an index it is the one that is current
  /// when the loader is made. Copies to an accelerator go through pinned memory, on a stream beside
  /// the loop's. Default: unset, tensors stay where they are
  TORCH_ARG(std::optional<c10::Device>, device) = {};
  /// Called on the loop's thread, with the number of samples of a batch that the loop is done with:
  /// when the loop asks for the next batch. Called with 0 before a pass draws anything. Made for
  /// `DistributedSampler::consume`: a position that the loop saves at the beginning of its body
  /// then includes all batches before. Samples are counted as the inner loader drew them, before
  /// the transform: in a tensor along its first dimension, in an `Example` or a pair along the
  /// first dimension of its first tensor, in a vector by element, in a type of yours by `size_t
  /// batch_size(const MyBatch&)`, declared beside that type. Default: none
  TORCH_ARG(std::function<void(size_t samples)>, on_consumed) = {};
};

namespace detail {

struct Unchanged {
  template <typename Batch>
  Batch operator()(Batch batch) const {
    return batch;
  }
};

}  // namespace detail

/// Prepares the next batches of a data loader while the loop works on the current one. Make it with
/// `make_prefetch_loader`.
///
/// `begin()` starts a pass over the inner loader. The loop gets the inner loader's batches in the
/// inner loader's order, whatever the number of workers. One worker thread at a time draws a batch
/// from the inner loader; all of them transform and copy their batches in parallel. So slow work
/// belongs in the transform, not in the dataset. A torch::data loader inside should have
/// `workers(0)`: with workers of its own it can begin again only after a pass that went to the end.
///
/// The loop gets an exception of the inner loader or of the transform, as it was thrown, in place
/// of that batch. The pass is over then, as after the last batch, and `begin()` starts another. A
/// loop may also end early: a pass ends with its iterator, the next `begin()` or the loader,
/// whichever is first. The end of a pass waits for the batches that the workers still prepare,
/// joins the workers and frees all prepared batches.
///
/// The workers take over grad mode, inference mode and autocast from the thread that calls
/// `begin()`. Each worker computes on one thread, so that the workers leave cores to the loop.
/// Several threads draw random numbers from LibTorch's default generator, in an order that differs
/// from run to run. A transform that must be repeatable takes a generator of its own, seeded by the
/// contents of the batch.
///
/// With a CUDA device (or another accelerator than MPS) the workers run on a side stream. The
/// stream that is current when the loop asks for a batch waits for the batch on the device; the
/// host does not wait for the device. A tensor that is not strided is an error there. Other devices
/// get plain copies.
///
/// Thread safety: one thread makes the loader, loops and destroys it. The transform is called from
/// `workers` threads at a time. During a pass the inner loader, its dataset and its sampler belong
/// to the workers. `consume` and `save` of a `DistributedSampler` may be called all the same.
/// Without `on_consumed`, the position that `save` writes includes samples that were drawn ahead.
///
/// Cost: `begin()` starts the threads. Memory: the batch in the loop and up to `depth` ahead of it;
/// in addition, a batch's input while it is transformed and its pinned copy while it is moved.
///
/// Example:
/// ```
/// auto loader = ddp::make_prefetch_loader(
///     torch::data::make_data_loader(dataset, sampler, /*options=*/32),
///     [](torch::data::Example<> batch) { return augmented(std::move(batch)); },
///     ddp::PrefetchOptions().workers(2).device(torch::kCUDA));
/// for (size_t epoch = 0; epoch < 10; ++epoch) {
///   sampler.set_epoch(epoch);
///   for (auto& batch : *loader) train(batch);
/// }
/// ```
template <typename Inner, typename Transform = detail::Unchanged>
class PrefetchLoader {
  using InnerBatch = std::decay_t<decltype(*detail::loader_in(std::declval<Inner&>()).begin())>;
  static_assert(
      std::is_invocable_v<const Transform&, InnerBatch>,
      "PrefetchLoader: the transform must take the inner loader's batch, and be callable while "
      "const, as the workers share it (no mutable lambda)");

 public:
  /// The type of the batches that the loop gets.
  using BatchType = std::decay_t<std::invoke_result_t<const Transform&, InnerBatch>>;
  static_assert(
      !std::is_void_v<BatchType>, "PrefetchLoader: the transform must return the loop's batch");

  /// The type that begin() returns.
  using Iterator = torch::data::Iterator<BatchType>;

  /// See `make_prefetch_loader`.
  PrefetchLoader(Inner inner, Transform transform, const PrefetchOptions& options)
      : inner_(std::move(inner)),
        transform_(std::move(transform)),
        setup_(detail::prepare_prefetch(
            options, is_null(),
            {c10::demangle_type<InnerBatch>(), detail::BatchSize<InnerBatch>::known,
             c10::demangle_type<BatchType>(), detail::can_move<BatchType>})) {}

  C10_DISABLE_COPY_AND_ASSIGN(PrefetchLoader);

  /// Ends the current pass.
  ~PrefetchLoader() { end_pass(); }

  /// Ends the current pass, begins a pass of the inner loader on this thread, and starts the
  /// workers.
  ///
  /// \return an iterator as torch::data's loaders return: its `++` and its first use wait for the
  ///         batch. It owns the pass; once another pass has begun, both throw c10::Error.
  /// \throws  the exceptions of the inner loader's `begin()`.
  Iterator begin() {
    end_pass();
    if (setup_.on_consumed) setup_.on_consumed(0);
    auto& inner = detail::loader_in(inner_);
    auto pass = std::make_shared<detail::PrefetchPass>(
        setup_, [this, position = inner.begin(), last = inner.end(), begun = false]() mutable {
          if (std::exchange(begun, true)) ++position;
          return position == last ? nullptr : job(detail::batch_at<InnerBatch>(position));
        });
    pass_ = pass;
    return Iterator(std::make_unique<torch::data::detail::ValidIterator<BatchType>>(
        [pass = std::move(pass)]() -> std::optional<BatchType> {
          auto job = pass->next();
          if (!job) return std::nullopt;
          return static_cast<Job&>(*job).take();
        }));
  }

  /// The iterator that compares equal to begin()'s at the end of a pass.
  Iterator end() {
    return Iterator(std::make_unique<torch::data::detail::SentinelIterator<BatchType>>());
  }

 private:
  using Job = detail::TransformJob<InnerBatch, BatchType, Transform>;

  bool is_null() const {
    if constexpr (
        std::is_constructible_v<bool, const Inner&> && !detail::has<detail::HasBegin, Inner>) {
      return !static_cast<bool>(inner_);
    } else {
      return false;
    }
  }

  std::unique_ptr<detail::PrefetchJob> job(InnerBatch batch) const {
    size_t samples = 0;
    if constexpr (detail::BatchSize<InnerBatch>::known) {
      if (setup_.on_consumed) samples = detail::BatchSize<InnerBatch>::of(batch);
    }
    return std::make_unique<Job>(std::move(batch), samples, transform_);
  }

  void end_pass() {
    if (const auto pass = pass_.lock()) pass->close();
  }

  Inner inner_;
  const Transform transform_;
  const detail::PrefetchSetup setup_;
  std::weak_ptr<detail::PrefetchPass> pass_;  // owned by the loop's iterator: the pass ends with it
};

/// Wraps a data loader so that worker threads prepare its batches ahead of the loop.
///
/// \param inner  a torch::data loader or anything else with `begin()` and `end()`, or a pointer of
///        any kind to one (a raw one must outlive the loader returned).
/// \param transform  takes a batch of the inner loader and returns the loop's. Called from several
///        threads at a time, so it is `const` there.
/// \return a pointer to a loader, as torch::data::make_data_loader returns.
/// \throws c10::ValueError  a null pointer; workers or depth < 1; a device that does not exist, or
///         batches whose tensors cannot be found to copy them to it (see move_tensors.h for types
///         of your own); on_consumed with batches that cannot be counted.
///
/// Collective: no.
template <typename Inner, typename Transform>
std::unique_ptr<PrefetchLoader<Inner, Transform>> make_prefetch_loader(
    Inner inner, Transform transform, const PrefetchOptions& options = {}) {
  return std::make_unique<PrefetchLoader<Inner, Transform>>(
      std::move(inner), std::move(transform), options);
}

/// The same without a transform: the inner loader's batches as they are.
template <typename Inner>
std::unique_ptr<PrefetchLoader<Inner>> make_prefetch_loader(
    Inner inner, const PrefetchOptions& options = {}) {
  return std::make_unique<PrefetchLoader<Inner>>(std::move(inner), detail::Unchanged(), options);
}

}  // namespace ddp
