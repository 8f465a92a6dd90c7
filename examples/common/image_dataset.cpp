#include "image_dataset.h"

#include <cmath>
#include <utility>

#include <ATen/ATen.h>

namespace examples {

PixelStatistics measure_pixels(const at::Tensor& images) {
  // Through a histogram: exact, and no copy of the images in floating point.
  const auto counts = at::bincount(images.flatten(), {}, /*minlength=*/256).to(at::kDouble);
  const auto values = at::arange(256, at::kDouble) / 255.0;
  const auto total = counts.sum();
  const auto mean = (counts * values).sum() / total;
  const auto variance = (counts * (values - mean).square()).sum() / total;
  const double stddev = std::sqrt(variance.item<double>());
  return {mean.item<double>(), stddev > 0 ? stddev : 1.0};
}

at::Tensor prepare_images(const at::Tensor& images, const PixelStatistics& pixels, int64_t size) {
  auto x = images.unsqueeze(1).to(at::kFloat).div_(255.0).sub_(pixels.mean).div_(pixels.stddev);
  if (x.size(2) == size && x.size(3) == size) return x;
  return at::upsample_bilinear2d(x, {size, size}, /*align_corners=*/false);
}

ImageDataset::ImageDataset(LabeledImages images, PixelStatistics pixels, int64_t size)
    : data_(std::move(images)), pixels_(pixels), image_size_(size) {}

torch::data::Example<> ImageDataset::get_batch(c10::ArrayRef<size_t> indices) {
  auto rows = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  for (const size_t index : indices) *row++ = static_cast<int64_t>(index);
  return {
      prepare_images(data_.images.index_select(0, rows), pixels_, image_size_),
      data_.labels.index_select(0, rows)};
}

std::optional<size_t> ImageDataset::size() const {
  return static_cast<size_t>(data_.labels.size(0));
}

}  // namespace examples
