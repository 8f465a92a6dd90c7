#include "augmented_images.h"

#include <utility>

#include <ATen/ATen.h>

namespace cifar10 {
namespace {

constexpr int64_t kPadding = 4;
constexpr int64_t kImageSize = 32;

// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
uint64_t mix_bits(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Batch Images::get_batch(c10::ArrayRef<size_t> indices) {
  auto rows = at::empty({static_cast<int64_t>(indices.size())}, at::kLong);
  std::copy(indices.begin(), indices.end(), rows.mutable_data_ptr<int64_t>());
  return {
      images_.images.index_select(0, rows), images_.labels.index_select(0, rows), indices.vec()};
}

std::optional<size_t> Images::size() const { return static_cast<size_t>(images_.labels.size(0)); }

Batch Augmentation::operator()(Batch batch) const {
  const auto whole = examples::prepare_images(batch.images, channels_, kImageSize);
  const auto padded = at::constant_pad_nd(whole, {kPadding, kPadding, kPadding, kPadding}, 0);
  const auto of_epoch =
      mix_bits(mix_bits(static_cast<uint64_t>(seed_)) + static_cast<uint64_t>(*epoch_));
  std::vector<at::Tensor> images;
  for (size_t i = 0; i < batch.indices.size(); ++i) {
    const auto random_bits = mix_bits(of_epoch + batch.indices[i]);
    const auto shift = [&](int bits) {
      return static_cast<int64_t>((random_bits >> bits) % (2 * kPadding + 1));
    };
    auto image = padded[static_cast<int64_t>(i)]
                     .narrow(1, shift(0), kImageSize)
                     .narrow(2, shift(16), kImageSize);
    images.push_back((random_bits >> 63) != 0 ? image.flip(2) : image);
  }
  return {at::stack(images), std::move(batch.labels), std::move(batch.indices)};
}

}  // namespace cifar10
