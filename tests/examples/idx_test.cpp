#include "examples/common/data/idx.h"

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::error_of;
using ddp::testing::TemporaryFolder;
using examples::read_idx_images;
using examples::read_idx_labels;
using examples::read_mnist;

constexpr uint32_t kImages = 0x00000803;
constexpr uint32_t kLabels = 0x00000801;

std::string header(const std::vector<uint32_t>& words) {
  std::string bytes;
  for (const uint32_t word : words) {
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(word >> shift);
  }
  return bytes;
}

std::string elements(size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<char>(i % 10);
  return bytes;
}

}  // namespace

TEST_CASE("images are read with their sizes, in file order", "[examples][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.write("images", header({kImages, 2, 3, 4}) + elements(24));
  const auto images = read_idx_images(path);
  CHECK(torch::equal(images, (torch::arange(24) % 10).to(torch::kByte).view({2, 3, 4})));
}

TEST_CASE("bytes above 127 stay positive", "[examples][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.write("images", header({kImages, 1, 1, 2}) + "\xff\x80");
  CHECK(
      torch::equal(read_idx_images(path), torch::tensor({255, 128}, torch::kByte).view({1, 1, 2})));
}

TEST_CASE("labels are read as integers", "[examples][pure]") {
  const TemporaryFolder folder;
  const auto path = folder.write("labels", header({kLabels, 10}) + elements(10));
  CHECK(torch::equal(read_idx_labels(path, 10), torch::arange(10)));
}

TEST_CASE("a missing file is named, with what to do", "[examples][errors]") {
  const TemporaryFolder folder;
  const auto path = folder.file("train-images-idx3-ubyte");
  CHECK(
      error_of<c10::ValueError>([&] { read_idx_images(path); }) ==
      path +
          ": expected an IDX file, found none (No such file or directory). Pass a folder with "
          "MNIST's four files, as scripts/download_mnist.sh makes it.");

  SECTION("a packed file beside it is found") {
    folder.write("train-images-idx3-ubyte.gz", "packed");
    CHECK_THAT(
        error_of<c10::ValueError>([&] { read_idx_images(path); }),
        ContainsText("Unpack " + path + ".gz with gunzip."));
  }
  SECTION("a folder is not a file") {
    CHECK_THAT(
        error_of<c10::ValueError>([&] { read_idx_images(folder.path()); }),
        ContainsText(folder.path() + ": expected an IDX file, found none (Is a directory)"));
  }
}

TEST_CASE("files that are no IDX files, or damaged, are refused", "[examples][errors]") {
  struct Bad {
    int64_t classes;  // of labels; 0: read as images
    std::string bytes;
    std::string text;  // after the path
  };
  const std::vector<Bad> files{
      {0, header({kLabels, 20}) + elements(20),
       ": expected the magic number 0x00000803 (unsigned bytes, 3 dimensions), found 0x00000801."},
      {10, header({kImages, 2, 3, 4}) + elements(24),
       ": expected the magic number 0x00000801 (unsigned bytes, 1 dimension), found 0x00000803."},
      {0, "\x1f\x8b\x08\x08 and so on: more than a header",
       ": expected the magic number 0x00000803 (unsigned bytes, 3 dimensions), found 0x1f8b0808. "
       "It is a gzip file: unpack it with gunzip."},
      {0, header({kImages, 2, 3}),
       ": expected a header of 16 bytes, found a file of 12. The file is cut short: fetch it "
       "again."},
      {10, "",
       ": expected a header of 8 bytes, found a file of 0. The file is cut short: fetch it again."},
      {0, header({kImages, 2, 3, 4}) + elements(23),
       ": expected 2 x 3 x 4 = 24 bytes after the header, found 23. The file is cut short: fetch "
       "it again."},
      {10, header({kLabels, 10}) + elements(11),
       ": expected 10 = 10 bytes after the header, found 11. The file is too long: fetch it "
       "again."},
      // 2^64 elements: the product must not wrap around to a small number.
      {0, header({kImages, 1u << 31, 1u << 31, 4}),
       ": expected 2147483648 x 2147483648 x 4 = 9223372036854775807 bytes after the header, found "
       "0. The file is cut short: fetch it again."},
      {0, header({kImages, 2, 0, 4}), ": expected sizes of at least 1, found 2 x 0 x 4."},
      {10, header({kLabels, 4}) + "\x01\x09\x0a\x02",
       ": expected labels from 0 to 9, found 10 at position 2."},
      {11, header({kLabels, 4}) + "\x01\x09\x0a\x02", ""}};
  const TemporaryFolder folder;
  for (const auto& [classes, bytes, text] : files) {
    const auto path = folder.write("file", bytes);
    const auto error = error_of<c10::ValueError>([&, classes = classes] {
      classes == 0 ? read_idx_images(path) : read_idx_labels(path, classes);
    });
    CHECK(error == (text.empty() ? "" : path + text));
  }
}

TEST_CASE("images and labels must have equal counts", "[examples][errors]") {
  const TemporaryFolder folder;
  const auto images =
      folder.write("train-images-idx3-ubyte", header({kImages, 3, 1, 1}) + elements(3));
  const auto labels = folder.write("train-labels-idx1-ubyte", header({kLabels, 2}) + elements(2));
  CHECK(error_of<c10::ValueError>([&] {
          read_mnist(folder.path(), "train");
        }) == labels + ": expected 3 labels, as many as images in " + images + ", found 2.");

  folder.write("train-labels-idx1-ubyte", header({kLabels, 3}) + elements(3));
  CHECK(read_mnist(folder.path(), "train").labels.size(0) == 3);
}

TEST_CASE("the digits in the repository are whole", "[examples][pure]") {
  const auto train = read_mnist(MNIST_DEFAULT_DATA, "train");
  const auto test = read_mnist(MNIST_DEFAULT_DATA, "t10k");
  CHECK(train.images.sizes() == at::IntArrayRef({1437, 8, 8}));
  CHECK(test.images.sizes() == at::IntArrayRef({360, 8, 8}));
  CHECK(std::get<0>(at::_unique(test.labels, /*sorted=*/true)).numel() == 10);
}
