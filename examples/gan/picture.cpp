#include "picture.h"

#include <algorithm>
#include <fstream>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include "../common/output_file.h"

namespace gan {
namespace {

constexpr int64_t kLeastSize = 32;  // pixels
constexpr int64_t kMargin = 2;      // pixels around each image
constexpr uint8_t kMarginGrey = 64;

}  // namespace

at::Tensor picture_of(const at::Tensor& images, int64_t columns) {
  const int64_t scale = std::max<int64_t>(1, kLeastSize / images.size(2));
  const auto enlarged = images.detach()
                            .cpu()
                            .squeeze(1)
                            .add(1)
                            .mul(127.5)
                            .round()
                            .clamp(0, 255)
                            .to(at::kByte)
                            .repeat_interleave(scale, 1)
                            .repeat_interleave(scale, 2);
  const int64_t height = enlarged.size(1) + 2 * kMargin;
  const int64_t width = enlarged.size(2) + 2 * kMargin;
  const int64_t rows = (images.size(0) + columns - 1) / columns;
  auto picture = at::full({rows * height, columns * width}, kMarginGrey, at::kByte);
  for (int64_t i = 0; i < images.size(0); ++i) {
    picture.narrow(0, i / columns * height + kMargin, enlarged.size(1))
        .narrow(1, i % columns * width + kMargin, enlarged.size(2))
        .copy_(enlarged[i]);
  }
  return picture;
}

void write_pgm(const std::string& path, const at::Tensor& pixels) {
  const auto bytes = pixels.contiguous();
  examples::write_file(path, [&](const std::string& part) {
    std::ofstream file(part, std::ios::binary);
    file << "P5\n" << bytes.size(1) << ' ' << bytes.size(0) << "\n255\n";
    file.write(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
    file.close();
    TORCH_CHECK(
        file.good(), path, ": expected to write ", bytes.numel(),
        " bytes, got an error. Is the disk full?");
  });
}

}  // namespace gan
