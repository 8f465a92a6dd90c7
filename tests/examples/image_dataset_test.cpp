#include "examples/common/data/image_dataset.h"

#include <cmath>
#include <vector>

#include <torch/torch.h>

#include "support/error_of.h"

#include "support/catch.h"

namespace {

using ddp::testing::error_of;
using examples::ImageDataset;
using examples::PixelStatistics;

at::Tensor bytes(const std::vector<int64_t>& values, at::IntArrayRef shape) {
  return torch::tensor(values).to(torch::kByte).view(shape);
}

}  // namespace

TEST_CASE("pixel statistics are those of all pixels in [0, 1]", "[examples][pure]") {
  const auto pixels = examples::measure_pixels(bytes({0, 255, 255, 0, 255, 0}, {2, 1, 3}));
  CHECK(pixels.mean == Approx(0.5));
  CHECK(pixels.stddev == Approx(0.5));

  const auto images = torch::randint(256, {7, 5, 3}, torch::kLong).to(torch::kByte);
  const auto scaled = images.to(torch::kDouble) / 255;
  const auto random = examples::measure_pixels(images);
  CHECK(random.mean == Approx(scaled.mean().item<double>()));
  CHECK(random.stddev == Approx(scaled.std(/*unbiased=*/false).item<double>()));
}

TEST_CASE("equal pixels do not divide by zero", "[examples][pure]") {
  const auto pixels = examples::measure_pixels(bytes({51, 51}, {1, 1, 2}));
  CHECK(pixels.stddev == 1.0);
  const auto prepared = examples::prepare_images(bytes({51, 51}, {1, 1, 2}), pixels, 2);
  CHECK(prepared.abs().max().item<float>() < 1e-6);
}

TEST_CASE("images of the right size are only scaled", "[examples][pure]") {
  const auto prepared =
      examples::prepare_images(bytes({0, 51, 102, 255}, {1, 2, 2}), PixelStatistics{0.2, 0.5}, 2);
  const auto expected = torch::tensor({-0.4, 0.0, 0.4, 1.6}).view({1, 1, 2, 2});
  CHECK(prepared.dtype() == torch::kFloat);
  CHECK(torch::allclose(prepared, expected, 0, 1e-6));
}

TEST_CASE("images of other sizes are resized bilinearly", "[examples][pure]") {
  // Pixel centres of 4 over 2 lie at -1/4, 1/4, 3/4, 5/4; beyond the edge, the edge pixel is
  // repeated.
  const auto prepared =
      examples::prepare_images(bytes({0, 255, 0, 255}, {1, 2, 2}), PixelStatistics{}, 4);
  const auto row = torch::tensor({0.0, 0.25, 0.75, 1.0});
  CHECK(torch::allclose(prepared, row.expand({1, 1, 4, 4}), 0, 1e-6));

  // Height and width each have their own factor.
  const auto wide = examples::prepare_images(
      bytes({0, 0, 0, 0, 255, 255, 255, 255}, {1, 2, 4}), PixelStatistics{}, 4);
  CHECK(torch::allclose(wide, row.view({4, 1}).expand({1, 1, 4, 4}), 0, 1e-6));

  // Smaller by 2 across and 4 down: each pixel lies between the middle two that it covers.
  const auto large = torch::randint(256, {3, 16, 8}, torch::kLong).to(torch::kByte);
  const auto pixel = large.to(torch::kFloat).unsqueeze(1) / 255;
  using torch::indexing::None;
  using torch::indexing::Slice;
  const auto rows = (pixel.index({"...", Slice(1, None, 4), Slice()}) +
                     pixel.index({"...", Slice(2, None, 4), Slice()})) /
                    2;
  const auto expected =
      (rows.index({"...", Slice(0, None, 2)}) + rows.index({"...", Slice(1, None, 2)})) / 2;
  CHECK(torch::allclose(examples::prepare_images(large, PixelStatistics{}, 4), expected, 0, 1e-6));
}

TEST_CASE("each channel has statistics of its own", "[examples][pure]") {
  const auto images = bytes({0, 255, 51, 51, 255, 255, 102, 102}, {2, 2, 1, 2});
  const auto channels = examples::measure_channels(images);
  REQUIRE(channels.size() == 2);
  CHECK(channels[0].mean == Approx(0.75));
  CHECK(channels[0].stddev == Approx(std::sqrt(0.1875)));
  CHECK(channels[1].mean == Approx(0.3));
  CHECK(channels[1].stddev == Approx(0.1));
  const auto whole = examples::measure_pixels(images);
  CHECK(whole.mean == Approx((channels[0].mean + channels[1].mean) / 2));

  const auto prepared = examples::prepare_images(images, {{0.5, 0.5}, {0.2, 0.1}}, 1);
  CHECK(prepared.sizes() == at::IntArrayRef({2, 2, 1, 1}));
  // Two neighbouring pixels become their mean.
  CHECK(torch::allclose(prepared.flatten(), torch::tensor({0.0, 0.0, 1.0, 2.0}), 0, 1e-5));
}

TEST_CASE(
    "grey images with and without a channel dimension are prepared alike", "[examples][pure]") {
  const auto images = torch::randint(256, {5, 8, 8}, torch::kLong).to(torch::kByte);
  const auto pixels = examples::measure_pixels(images);
  const auto channels = examples::measure_channels(images.unsqueeze(1));
  REQUIRE(channels.size() == 1);
  CHECK(channels[0].mean == pixels.mean);
  CHECK(channels[0].stddev == pixels.stddev);
  for (const int64_t size : {8, 28}) {
    CAPTURE(size);
    CHECK(torch::equal(
        examples::prepare_images(images, pixels, size),
        examples::prepare_images(images.unsqueeze(1), channels, size)));
  }
}

TEST_CASE("statistics of another number of channels are refused", "[examples][errors]") {
  const auto colour = bytes({1, 2, 3}, {1, 3, 1, 1});
  CHECK(
      error_of<c10::ValueError>([&] { examples::prepare_images(colour, PixelStatistics{}, 1); }) ==
      "prepare_images: expected statistics of 3 channels, as the images have, got 1. "
      "measure_channels measures them.");
  const auto grey = bytes({1, 2, 3}, {3, 1, 1});
  CHECK_THAT(
      error_of<c10::ValueError>(
          [&] { examples::prepare_images(grey, examples::measure_channels(colour), 1); }),
      ContainsText("expected statistics of 1 channels, as the images have, got 3"));
}

TEST_CASE("a batch holds the images and labels that were asked for", "[examples][pure]") {
  examples::LabeledImages data{bytes({0, 51, 102, 255}, {4, 1, 1}), torch::tensor({7, 8, 9, 1})};
  ImageDataset dataset(data, PixelStatistics{}, /*size=*/1);
  CHECK(dataset.size() == 4);
  const auto batch = dataset.get_batch(std::vector<size_t>{3, 1, 1});
  CHECK(torch::allclose(batch.data, torch::tensor({1.0, 0.2, 0.2}).view({3, 1, 1, 1})));
  CHECK(torch::equal(batch.target, torch::tensor({1, 8, 8})));
}
