#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include "data_file.h"

namespace examples {

/// Mean and standard deviation of pixels scaled to [0, 1].
struct PixelStatistics {
  double mean = 0;
  double stddev = 1;
};

/// Measures all pixels of `images` (uint8, of any shape): MNIST's 0.1307 and 0.3081, for one.
/// The deviation is 1 where all pixels are equal, so that dividing by it is safe.
PixelStatistics measure_pixels(const at::Tensor& images);

/// The same for each channel of `images` ([N, channels, height, width] uint8).
std::vector<PixelStatistics> measure_channels(const at::Tensor& images);

/// Turns raw pixels into the network's input: scales them to [0, 1], subtracts the mean, divides by
/// the deviation, and resizes bilinearly (as torch.nn.functional.interpolate, align_corners=False)
/// to size x size.
///
/// \param images    [N, height, width], which are of one channel, or [N, channels, height, width]
///                  uint8.
/// \param channels  as many as the images have.
/// \return [N, channels, size, size] float.
/// \throws c10::ValueError  statistics of another number of channels.
at::Tensor prepare_images(
    const at::Tensor& images, c10::ArrayRef<PixelStatistics> channels, int64_t size);

/// Labeled images in batches: data [B, channels, size, size] float, target [B] int64.
///
/// Holds the raw bytes, which its copies share, and prepares the images of a batch when it is
/// drawn.
class ImageDataset
    : public torch::data::datasets::BatchDataset<ImageDataset, torch::data::Example<>> {
 public:
  /// \param channels  of the training split, for every split.
  ImageDataset(LabeledImages images, c10::ArrayRef<PixelStatistics> channels, int64_t size = 28);

  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) override;
  std::optional<size_t> size() const override;

 private:
  LabeledImages data_;
  std::vector<PixelStatistics> channels_;
  int64_t image_size_;
};

}  // namespace examples
