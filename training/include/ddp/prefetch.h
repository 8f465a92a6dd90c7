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
  /// The most batches that are drawn ahead of the loop, those that workers have in hand included,
  /// >= 1. With fewer than `workers`, only that many threads are started. Default: workers + 1
  TORCH_ARG(std::optional<int64_t>, depth) = {};
  /// Where the loop gets the tensors of its batches; without an index, the device that is current
  /// when the loader is made. Copies to an accelerator go through pinned memory, on a stream beside
  /// the loop's. Default: unset, tensors stay where they are
  TORCH_ARG(std::optional<c10::Device>, device) = {};
  /// Called with a batch's number of samples when the loop is done with it: on the loop's thread,
  /// when it asks for the next batch; and with 0 before a pass draws anything. Made for
  /// `DistributedSampler::consume`: a position that is saved at the beginning of the loop's body is
  /// then behind the batch before. Samples are counted as the inner loader drew them, before the
  /// transform: in a tensor, `Example` or pair along the first dimension of (its first) tensor, in
  /// a vector its elements, in a type of yours by `size_t batch_size(const MyBatch&)`, declared
  /// beside it. Default: none
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

/// Prepares the next batches of a data loader while the loop works on this one. Make it with
/// `make_prefetch_loader`.
///
/// It goes on as the inner loader does: `begin()` starts a pass over it, and the loop gets its
/// batches in its order, whatever the number of workers. Worker threads take turns at drawing a
/// batch from the inner loader, and transform and copy theirs side by side: so slow work belongs in
/// the transform, not in the dataset. A torch::data loader inside is best left with `workers(0)`:
/// with workers of its own it can only begin again after a pass that went to the end.
///
/// An exception in the inner loader or the transform reaches the loop, as it was thrown, where its
/// batch would have come; the pass is over then, as it is after the last batch, and `begin()`
/// starts another. A loop may also end early: a pass ends with its iterator, the next `begin()` or
/// the loader, whichever is first. That waits for what workers have in hand, joins them and frees
/// what they prepared.
///
/// What the thread that calls `begin()` has set for itself (grad mode, inference mode, autocast)
/// holds on the workers too; but each of them computes on one thread, or together they would crowd
/// out the loop. Random numbers from LibTorch's default generator are drawn on several threads now,
/// in an order that differs from run to run: a transform that must be repeatable takes its own
/// generator, seeded by what is in the batch.
///
/// With a CUDA device (or another accelerator, but MPS) the workers run on a side stream. The
/// stream that is current where the loop asks for a batch waits for it on the device; the host
/// never does. Tensors must be strided there, or the batch is an error. Other devices get plain
/// copies.
///
/// Thread safety: one thread makes the loader, loops and destroys it. The transform is called from
/// `workers` threads at a time. The inner loader, its dataset and its sampler belong to the workers
/// during a pass; of a `DistributedSampler`, `consume` and `save` may be called all the same (see
/// `on_consumed`, without which its position counts samples drawn ahead).
///
/// Cost: `begin()` starts the threads. Memory: the batch in the loop, up to `depth` ahead of it,
/// and on top a batch's input while it is transformed and its pinned copy while it is moved.
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
  /// What the loop gets.
  using BatchType = std::decay_t<std::invoke_result_t<const Transform&, InnerBatch>>;
  static_assert(
      !std::is_void_v<BatchType>, "PrefetchLoader: the transform must return the loop's batch");

  using Iterator = torch::data::Iterator<BatchType>;

  /// See `make_prefetch_loader`.
  PrefetchLoader(Inner inner, Transform transform, const PrefetchOptions& options)
      : inner_(std::move(inner)),
        transform_(std::move(transform)),
        setup_(detail::prepare_prefetch(
            options, is_null(),
            {c10::demangle_type<InnerBatch>(), detail::BatchSize<InnerBatch>::known,
             c10::demangle_type<BatchType>(), detail::can_move<BatchType>})) {}

  PrefetchLoader(const PrefetchLoader&) = delete;
  PrefetchLoader& operator=(const PrefetchLoader&) = delete;

  /// Ends the pass that is on.
  ~PrefetchLoader() { end_pass(); }

  /// Ends the pass that is on, begins one of the inner loader, on this thread, and starts the
  /// workers on it.
  ///
  /// \return an iterator as torch::data's loaders return: its `++`, and the first use of it, wait
  ///         for the batch. It holds the pass; once another has begun, both throw c10::Error.
  /// \throws  what the inner loader's `begin()` throws.
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

  /// What an iterator equals at the end of its pass.
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
  std::weak_ptr<detail::PrefetchPass> pass_;  // its iterator's, so that it ends with the loop
};

/// Wraps a data loader so that worker threads prepare its batches ahead of the loop.
///
/// \param inner  a torch::data loader or anything else with `begin()` and `end()`, or a pointer of
///        any kind to one (a raw one must outlive the loader returned).
/// \param transform  takes a batch of the inner loader and returns the loop's. Called from several
///        threads at a time, so it is `const` there.
/// \return a pointer to a loader, as torch::data::make_data_loader returns.
/// \throws c10::ValueError  a null pointer; workers or depth < 1; a device that is not there, or
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
