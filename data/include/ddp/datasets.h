#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <ddp/export.h>
#include <torch/data/datasets/base.h>

namespace ddp {

/// \file
/// Data sets that are made of others. They are LibTorch's: for `make_data_loader`, `map`, the
/// samplers and `prepare`.
///
/// Copies of one copy the data set inside, as LibTorch does for each worker of a loader. Where that
/// costs memory, put it into `torch::data::datasets::make_shared_dataset`; all copies then use the
/// one, from several threads where a loader has workers.

namespace detail {

template <typename Batch>
struct SampleOf;  // of batches that are lists of samples
template <typename Sample>
struct SampleOf<std::vector<Sample>> {
  using type = Sample;
};

/// \throws c10::ValueError  unless there is a size and all indices are below it.
DDP_API void check_subset(const std::vector<size_t>& indices, std::optional<size_t> size);
/// \throws c10::ValueError  unless it is below `size`.
DDP_API void check_sample_index(const char* name, size_t index, size_t size);
/// \throws c10::Error  unless a data set has given as many samples as it was asked for.
DDP_API void check_sample_count(const char* name, size_t given, size_t asked);

using Parts = std::vector<std::vector<size_t>>;
/// The indices of each part of random_split().
DDP_API Parts
split_indices(std::optional<size_t> size, const std::vector<double>& fractions, uint64_t seed);
DDP_API Parts
split_indices(std::optional<size_t> size, const std::vector<int64_t>& lengths, uint64_t seed);

/// The first number of each part, and the sum of all sizes.
///
/// \throws c10::ValueError  without parts, or where one has no size.
DDP_API std::vector<size_t> begins_of_parts(const std::vector<std::optional<size_t>>& sizes);

template <typename Length>
using IfLength = std::enable_if_t<std::is_integral_v<Length> && !std::is_same_v<Length, bool>, int>;

}  // namespace detail

/// Some samples of a data set, by their numbers there.
///
/// \tparam D  a data set of LibTorch's that loads by index.
///
/// Source: torch.utils.data.Subset, torch 2.11.0.
template <typename D>
class Subset : public torch::data::datasets::BatchDataset<
                   Subset<D>, typename D::BatchType, typename D::BatchRequestType> {
  static_assert(
      std::is_same_v<typename D::BatchRequestType, c10::ArrayRef<size_t>> && !D::is_stateful,
      "Subset: expected a data set that loads by index, not a stream or a stateful one");

 public:
  /// The result of get_batch(): the data set's.
  using BatchType = typename D::BatchType;

  /// \param indices  of samples of the data set, in any order, also repeated.
  /// \throws c10::ValueError  an index that the data set does not have, or one without a size.
  Subset(D dataset, std::vector<size_t> indices)
      : Subset(
            std::move(dataset), std::make_shared<const std::vector<size_t>>(std::move(indices))) {}

  /// The samples that have these numbers here.
  ///
  /// \throws c10::ValueError  a number that is not below size().
  BatchType get_batch(c10::ArrayRef<size_t> positions) override {
    std::vector<size_t> numbers;
    numbers.reserve(positions.size());
    for (const auto position : positions) {
      detail::check_sample_index("Subset", position, indices_->size());
      numbers.push_back((*indices_)[position]);
    }
    return dataset_.get_batch(numbers);
  }

  /// One sample; not of a data set whose batches are no lists of samples, as after `Stack`.
  template <typename Batch = BatchType>
  typename detail::SampleOf<Batch>::type get(size_t index) {
    auto samples = get_batch(index);
    detail::check_sample_count("Subset", samples.size(), 1);
    return std::move(samples.front());
  }

  /// How many samples it has.
  std::optional<size_t> size() const override { return indices_->size(); }

  /// The samples' numbers in the data set.
  const std::vector<size_t>& indices() const { return *indices_; }
  /// The data set that it has samples of.
  const D& dataset() const { return dataset_; }

 private:
  Subset(D dataset, std::shared_ptr<const std::vector<size_t>> indices)
      : dataset_(std::move(dataset)), indices_(std::move(indices)) {
    detail::check_subset(*indices_, dataset_.size());
  }

  D dataset_;
  std::shared_ptr<const std::vector<size_t>> indices_;  // shared by copies, also on other threads
};

/// Divides a data set into parts that have no sample in common.
///
/// A seed gives the same parts in every process and run, so let all ranks pass the same one. They
/// are Python's of `generator=torch.Generator().manual_seed(seed)`, in the same order.
///
/// \param dataset  of LibTorch's kinds that load by index, with a size(). Each part has a copy.
/// \param fractions  of the parts, from 0 to 1, whose sum is 1 within 1e-9: each part gets the
///        fraction of the size, rounded down; what is left goes to the parts one by one, from the
///        first. A part may be empty, where Python warns.
/// \return  the parts, in the order of the fractions.
/// \throws c10::ValueError  for other fractions, and for a data set without a size.
///
/// Example:
/// ```
/// auto parts = ddp::random_split(dataset, {0.8, 0.2}, /*seed=*/1);
/// ddp::DistributedSampler sampler(*parts[0].size());
/// auto loader = torch::data::make_data_loader(parts[0].map(Stack<>()), sampler, 64);
/// ```
///
/// Collective: no; `DistributedSampler::check_dataset` compares the ranks' parts.
/// Cost: 8 bytes a sample, and a copy of the data set for each part.
/// Source: torch.utils.data.random_split, torch 2.11.0.
template <typename D>
std::vector<Subset<D>> random_split(D dataset, std::vector<double> fractions, uint64_t seed) {
  std::vector<Subset<D>> parts;
  for (auto& part : detail::split_indices(dataset.size(), fractions, seed)) {
    parts.emplace_back(dataset, std::move(part));
  }
  return parts;
}

/// The same by whole numbers, the parts' sizes: `random_split(dataset, {50000, 10000}, 1)`.
///
/// \param lengths  at least 0, whose sum is the data set's size.
template <typename D, typename Length, detail::IfLength<Length> = 0>
std::vector<Subset<D>> random_split(D dataset, const std::vector<Length>& lengths, uint64_t seed) {
  const std::vector<int64_t> sizes(lengths.begin(), lengths.end());
  std::vector<Subset<D>> parts;
  for (auto& part : detail::split_indices(dataset.size(), sizes, seed)) {
    parts.emplace_back(dataset, std::move(part));
  }
  return parts;
}
/// The same for a list in braces.
template <typename D, typename Length, detail::IfLength<Length> = 0>
std::vector<Subset<D>> random_split(
    D dataset, std::initializer_list<Length> lengths, uint64_t seed) {
  return random_split(
      std::move(dataset), std::vector<int64_t>(lengths.begin(), lengths.end()), seed);
}

/// Several data sets one after the other.
///
/// \tparam D  a data set of LibTorch's that loads by index, whose batches are lists of samples: put
///         `map(Stack<>())` around the whole.
///
/// Source: torch.utils.data.ConcatDataset, torch 2.11.0, which also takes data sets of different
/// types.
template <typename D>
class ConcatDataset
    : public torch::data::datasets::Dataset<
          ConcatDataset<D>, typename detail::SampleOf<typename D::BatchType>::type> {
  static_assert(
      std::is_same_v<typename D::BatchRequestType, c10::ArrayRef<size_t>> && !D::is_stateful,
      "ConcatDataset: expected data sets that load by index, not streams or stateful ones");
  using Sample = typename detail::SampleOf<typename D::BatchType>::type;

 public:
  /// \param datasets  not empty; each with a size().
  /// \throws c10::ValueError  for others.
  explicit ConcatDataset(std::vector<D> datasets)
      : datasets_(std::move(datasets)), begins_(detail::begins_of_parts(sizes())) {}
  /// The same: `ddp::ConcatDataset all({first, second});`
  ConcatDataset(std::initializer_list<D> datasets) : ConcatDataset(std::vector<D>(datasets)) {}

  /// One sample.
  ///
  /// \throws c10::ValueError  a number that is not below size().
  Sample get(size_t index) override { return std::move(get_batch(index).front()); }

  /// The samples that have these numbers. Each data set is asked once, for all of its samples.
  std::vector<Sample> get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<std::vector<size_t>> numbers(datasets_.size()), places(datasets_.size());
    for (size_t i = 0; i < indices.size(); ++i) {
      const auto part = part_of(indices[i]);
      numbers[part].push_back(indices[i] - begins_[part]);
      places[part].push_back(i);
    }
    std::vector<std::optional<Sample>> found(indices.size());
    for (size_t part = 0; part < datasets_.size(); ++part) {
      if (numbers[part].empty()) continue;
      auto samples = datasets_[part].get_batch(numbers[part]);
      detail::check_sample_count("ConcatDataset", samples.size(), numbers[part].size());
      for (size_t i = 0; i < samples.size(); ++i) found[places[part][i]] = std::move(samples[i]);
    }
    std::vector<Sample> batch;
    batch.reserve(found.size());
    for (auto& sample : found) batch.push_back(std::move(*sample));
    return batch;
  }

  /// How many samples all have together.
  std::optional<size_t> size() const override { return begins_.back(); }

  /// The data sets, in their order.
  const std::vector<D>& datasets() const { return datasets_; }

 private:
  std::vector<std::optional<size_t>> sizes() const {
    std::vector<std::optional<size_t>> sizes;
    for (const auto& dataset : datasets_) sizes.push_back(dataset.size());
    return sizes;
  }
  size_t part_of(size_t index) const {
    detail::check_sample_index("ConcatDataset", index, begins_.back());
    const auto next = std::upper_bound(begins_.begin(), begins_.end(), index);
    return static_cast<size_t>(next - begins_.begin()) - 1;
  }

  std::vector<D> datasets_;
  std::vector<size_t> begins_;  // of each data set's numbers, and the end of all
};

}  // namespace ddp
