#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/datasets/base.h>

#include "../common/image_dataset.h"

namespace cifar10 {

/// Images and what they show, with their places in the data set.
struct Batch {
  at::Tensor images;  // [B, 3, 32, 32]; uint8 as they are stored, then float
  at::Tensor labels;  // [B] int64
  std::vector<size_t> indices;
};

/// The stored images, drawn in batches.
class Images : public torch::data::datasets::BatchDataset<Images, Batch> {
 public:
  explicit Images(examples::LabeledImages images) : images_(std::move(images)) {}

  Batch get_batch(c10::ArrayRef<size_t> indices) override;
  std::optional<size_t> size() const override;

 private:
  examples::LabeledImages images_;
};

/// Makes the network's input of stored images: each shifted by up to four pixels and mirrored, or
/// not, as chance wants it.
///
/// An image's chance is drawn from the seed, the epoch and its place in the data set. So a rank
/// draws its own, and a run can be repeated with other numbers of loader workers and of ranks.
///
/// Threads: any.
class Augmentation {
 public:
  /// \param epoch  the current one, for all copies.
  Augmentation(
      std::vector<examples::PixelStatistics> channels, int64_t seed,
      std::shared_ptr<const std::atomic<int64_t>> epoch)
      : channels_(std::move(channels)), seed_(seed), epoch_(std::move(epoch)) {}

  Batch operator()(Batch batch) const;

 private:
  std::vector<examples::PixelStatistics> channels_;
  int64_t seed_;
  std::shared_ptr<const std::atomic<int64_t>> epoch_;
};

}  // namespace cifar10
