#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/datasets/base.h>

#include "../common/data/image_dataset.h"

namespace cifar10 {

/// Images and labels, with their indices in the data set.
struct Batch {
  at::Tensor images;  // [B, 3, 32, 32]; uint8 as stored, then float
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

/// Turns stored images into the network's input: each is shifted by up to four pixels, and mirrored
/// or not, at random.
///
/// The random numbers of an image depend on the seed, the epoch and its index in the data set. So
/// each rank draws its own, and a run can be repeated with other numbers of loader workers and of
/// ranks.
///
/// Threads: any.
class Augmentation {
 public:
  /// \param epoch  the current one, shared by all copies.
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
