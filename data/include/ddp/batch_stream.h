#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <ddp/detail/prefetch_pass.h>
#include <ddp/process_group.h>
#include <ddp/sharded_sampler.h>
#include <torch/serialize/archive.h>

namespace ddp {

/// The batches of several epochs, one by one, from a data loader over a ShardedSampler. Its
/// position is the sampler's, counted by the batches that next() returned: a loader that draws
/// ahead does not matter.
///
/// For Elastic: after a change it begins the loader again at that position, with the new ranks.
///
/// Thread safety: none. Ownership: loader and sampler must outlive it. The loader has a copy of the
/// sampler.
///
/// Example:
/// ```
/// ddp::BatchStream batches(*loader, sampler, /*epochs=*/10);
/// while (auto batch = batches.next()) train(*batch);
/// ```
template <typename Loader>
class BatchStream {
  using Position = std::decay_t<decltype(std::declval<Loader&>().begin())>;

 public:
  /// What the loader gives.
  using Batch = std::decay_t<decltype(*std::declval<Position&>())>;
  static_assert(
      detail::BatchSize<Batch>::known,
      "BatchStream: expected batches of a known size: a tensor, an Example, a pair, a vector, or a "
      "type with `size_t batch_size(const MyBatch&)` beside it");

  /// \param epochs  how many there are in all, whichever the sampler is in.
  BatchStream(Loader& loader, ShardedSampler& sampler, size_t epochs)
      : loader_(loader), sampler_(sampler), epochs_(epochs) {}
  C10_DISABLE_COPY_AND_ASSIGN(BatchStream);

  /// \return nothing after the last epoch.
  std::optional<Batch> next() {
    while (!is_over_) {
      if (position_) {
        ++*position_;
      } else if (sampler_.is_over()) {
        begin_next_epoch();
        continue;
      } else {
        position_.emplace(loader_.begin());
      }
      if (*position_ != loader_.end()) {
        Batch batch = detail::batch_at<Batch>(*position_);
        sampler_.consume(detail::BatchSize<Batch>::of(batch));
        return batch;
      }
      position_.reset();
      begin_next_epoch();
    }
    return std::nullopt;
  }

  /// Of the batches that next() returns, from 0.
  size_t epoch() const { return sampler_.epoch(); }

  /// Goes on with the ranks of another group: ShardedSampler::rebind().
  ///
  /// Collective: yes.
  void rebind(const GroupArg& group = {}) {
    const auto go_back = sampler_.bookmark();
    end_pass();
    go_back();
    sampler_.rebind(group);
  }

  /// Returns a function that takes it back to the present position.
  std::function<void()> bookmark() {
    return [this, go_back = sampler_.bookmark()] {
      end_pass();
      go_back();
    };
  }

  /// Writes the sampler's position.
  void save(torch::serialize::OutputArchive& archive) const { sampler_.save(archive); }
  /// Goes on at the position that save() wrote.
  void load(torch::serialize::InputArchive& archive) {
    end_pass();
    sampler_.load(archive);
  }

 private:
  void begin_next_epoch() {
    is_over_ = sampler_.epoch() + 1 >= epochs_;
    if (!is_over_) sampler_.set_epoch(sampler_.epoch() + 1);
  }

  /// A loader with workers begins again only after a pass that went to its end. Batches that it has
  /// drawn ahead are dropped, and so are their errors.
  void end_pass() {
    is_over_ = false;
    if (!position_) return;
    sampler_.stop();
    try {
      while (*position_ != loader_.end()) ++*position_;
    } catch (const std::exception&) {
    }
    position_.reset();
  }

  Loader& loader_;
  ShardedSampler& sampler_;
  const size_t epochs_;
  std::optional<Position> position_;
  bool is_over_ = false;
};

}  // namespace ddp
