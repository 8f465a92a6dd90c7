#include "image_dataset.h"

#include <cmath>
#include <utility>

#include <ATen/ATen.h>

namespace examples {

PixelStatistics measure_pixels(const at::Tensor& images) {
  // A histogram makes the sums exact, and needs no floating-point copy of the images.
  const auto counts = at::bincount(images.flatten(), {}, /*minlength=*/256).to(at::kDouble);
  const auto values = at::arange(256, at::kDouble) / 255.0;
  const auto total = counts.sum();
  const auto mean = (counts * values).sum() / total;
  const auto variance = (counts * (values - mean).square()).sum() / total;
  const double stddev = std::sqrt(variance.item<double>());
  return {mean.item<double>(), stddev > 0 ? stddev : 1.0};
}

std::vector<PixelStatistics> measure_channels(const at::Tensor& images) {
  std::vector<PixelStatistics> channels;
  for (const auto& channel : images.unbind(1)) channels.push_back(measure_pixels(channel));
  return channels;
}

at::Tensor prepare_images(
    const at::Tensor& images, c10::ArrayRef<PixelStatistics> channels, int64_t size) {
  const at::Tensor raw = images.dim() == 3 ? images.unsqueeze(1) : images;
  TORCH_CHECK_VALUE(
      raw.size(1) == static_cast<int64_t>(channels.size()),
      "prepare_images: expected statistics of ", raw.size(1), " channels, as the images have, got ",
      channels.size(), ". measure_channels measures them.");
  auto x = raw.to(at::kFloat).div_(255.0);
  for (size_t c = 0; c < channels.size(); ++c) {
    x.select(1, static_cast<int64_t>(c)).sub_(channels[c].mean).div_(channels[c].stddev);
  }
  if (x.size(2) == size && x.size(3) == size) return x;
  return at::upsample_bilinear2d(x, {size, size}, /*align_corners=*/false);
}

ImageDataset::ImageDataset(
    LabeledImages images, c10::ArrayRef<PixelStatistics> channels, int64_t size)
    : data_(std::move(images)), channels_(channels.vec()), image_size_(size) {}

torch::data::Example<> ImageDataset::get_batch(c10::ArrayRef<size_t> indices) {
  auto rows = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  for (const size_t index : indices) *row++ = static_cast<int64_t>(index);
  return {
      prepare_images(data_.images.index_select(0, rows), channels_, image_size_),
      data_.labels.index_select(0, rows)};
}

std::optional<size_t> ImageDataset::size() const {
  return static_cast<size_t>(data_.labels.size(0));
}

}  // namespace examples
