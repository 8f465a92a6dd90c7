#pragma once

/// The parts of `PrefetchLoader` (see prefetch.h) that work for any type of batch. Not a public
/// header: its names may change at any time. prefetch.h includes it only because the loader is a
/// template.

#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <ddp/export.h>
#include <ddp/move_tensors.h>
#include <torch/data/example.h>

namespace ddp {

struct PrefetchOptions;

namespace detail {

template <typename Data, typename Target>
struct Mover<torch::data::Example<Data, Target>> {
  using Example = torch::data::Example<Data, Target>;
  static constexpr bool holds_tensors = can_move<Data> || can_move<Target>;
  static Example move(const TensorMove& to, const Example& example) {
    return Example(moved_by(to, example.data), moved_by(to, example.target));
  }
};
template <typename Data>
struct Mover<torch::data::Example<Data, torch::data::example::NoTarget>> {
  using Example = torch::data::Example<Data, torch::data::example::NoTarget>;
  static constexpr bool holds_tensors = can_move<Data>;
  static Example move(const TensorMove& to, const Example& example) {
    return Example(moved_by(to, example.data));
  }
};

template <typename T>
using OwnBatchSize = decltype(static_cast<size_t>(batch_size(std::declval<const T&>())));

/// How many samples a batch of type `T` holds. Unknown in general; known for a user's type that has
/// a function `size_t batch_size(const MyBatch&)` declared beside it.
template <typename T>
struct BatchSize {
  static constexpr bool known = has<OwnBatchSize, T>;
  static size_t of(const T& batch) { return static_cast<size_t>(batch_size(batch)); }
};
template <>
struct BatchSize<at::Tensor> {
  static constexpr bool known = true;
  static size_t of(const at::Tensor& batch) { return static_cast<size_t>(batch.size(0)); }
};
template <typename T>
struct BatchSize<std::vector<T>> {
  static constexpr bool known = true;
  static size_t of(const std::vector<T>& batch) { return batch.size(); }
};
template <typename A, typename B>
struct BatchSize<std::pair<A, B>> {
  static constexpr bool known = BatchSize<A>::known;
  static size_t of(const std::pair<A, B>& batch) { return BatchSize<A>::of(batch.first); }
};
template <typename Data, typename Target>
struct BatchSize<torch::data::Example<Data, Target>> {
  static constexpr bool known = BatchSize<Data>::known;
  static size_t of(const torch::data::Example<Data, Target>& batch) {
    return BatchSize<Data>::of(batch.data);
  }
};

template <typename T>
using HasBegin = decltype(std::declval<T&>().begin());

/// Returns `inner`, or the object that it points to.
template <typename Inner>
auto& loader_in(Inner& inner) {
  if constexpr (has<HasBegin, Inner>) {
    return inner;
  } else {
    return *inner;
  }
}

template <typename Iterator>
using MultiPass = std::enable_if_t<std::is_base_of_v<
    std::forward_iterator_tag, typename std::iterator_traits<Iterator>::iterator_category>>;

/// Moves the batch out of a loader's iterator. A multi-pass iterator points into a container:
/// there, the batch is copied.
template <typename Batch, typename Iterator>
Batch batch_at(Iterator& position) {
  if constexpr (has<MultiPass, Iterator>) {
    return Batch(*position);
  } else {
    return Batch(std::move(*position));
  }
}

/// A batch between the inner loader and the loop.
class PrefetchJob {
 public:
  explicit PrefetchJob(size_t samples) : samples_(samples) {}
  virtual ~PrefetchJob() = default;

  /// Transforms the batch and, unless `to_device` is null, moves its tensors. Called once, on any
  /// thread.
  virtual void run(const TensorMove* to_device) = 0;

  /// The number of samples in the batch as the inner loader drew it; 0 without `on_consumed`.
  size_t samples() const { return samples_; }

 private:
  size_t samples_;
};

template <typename In, typename Out, typename Transform>
class TransformJob final : public PrefetchJob {
 public:
  TransformJob(In batch, size_t samples, const Transform& transform)
      : PrefetchJob(samples), in_(std::move(batch)), transform_(transform) {}

  void run(const TensorMove* to_device) override {
    out_.emplace(std::invoke(transform_, std::move(*in_)));
    in_.reset();
    if constexpr (can_move<Out>) {
      if (to_device) out_.emplace(moved_by(*to_device, *out_));
    }
  }

  Out take() { return std::move(*out_); }

 private:
  std::optional<In> in_;
  const Transform& transform_;
  std::optional<Out> out_;
};

/// The facts about the batches' types that `prepare_prefetch` needs.
struct BatchFacts {
  const char* inner_type;
  bool can_count;
  const char* loop_type;
  bool can_move;
};

/// Checked options, and the values that follow from them.
struct PrefetchSetup {
  size_t workers;
  size_t depth;
  std::optional<c10::Device> device;
  /// The stream of copies and transforms, if `device` has streams.
  std::optional<c10::Stream> side_stream;
  std::function<void(size_t samples)> on_consumed;
};

/// \throws c10::ValueError  as `make_prefetch_loader` says.
DDP_API PrefetchSetup
prepare_prefetch(const PrefetchOptions& options, bool inner_is_null, const BatchFacts& facts);

/// One pass over the inner loader: the threads, from `begin()` until the pass is over.
class DDP_API PrefetchPass {
 public:
  /// Returns the inner loader's next batch, or null after the last.
  using Draw = std::function<std::unique_ptr<PrefetchJob>()>;

  /// \param setup  must live until `close`.
  PrefetchPass(const PrefetchSetup& setup, Draw draw);
  ~PrefetchPass();

  /// Returns the next finished batch, for the current stream of the calling thread; null at the
  /// end.
  std::unique_ptr<PrefetchJob> next();

  /// Joins the threads and drops their batches; `next` is an error from here on.
  void close();

 private:
  class TransferWork;
  struct Running;
  class WorkerGuard;

  std::unique_ptr<Running> running_;  // null once closed
};

}  // namespace detail
}  // namespace ddp
