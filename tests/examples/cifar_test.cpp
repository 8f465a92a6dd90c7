#include "examples/common/data/cifar.h"

#include <sys/stat.h>

#include <cstdio>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "examples/common/data/image_dataset.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::error_of;
using ddp::testing::TemporaryFolder;
using examples::CifarLabels;
using examples::read_cifar10;
using examples::read_cifar100;

constexpr int64_t kImageBytes = 3072;

// No two images are equal, nor two rows or columns of one; each channel is half as bright as the
// previous one.
uint8_t pixel(int64_t image, int64_t position) {
  const int64_t value = (image * 101 + position * 7 + position / 256) % 256;
  return static_cast<uint8_t>(value >> (position / 1024));
}

// Makes records of images `first`, `first` + 1, ...: the label bytes given for each, and its
// pixels.
std::string records(const std::vector<std::string>& labels, int64_t first = 0) {
  std::string bytes;
  for (const auto& label : labels) {
    bytes += label;
    for (int64_t p = 0; p < kImageBytes; ++p) bytes += static_cast<char>(pixel(first, p));
    ++first;
  }
  return bytes;
}

std::string one(int label) { return std::string(1, static_cast<char>(label)); }
std::string coarse_and_fine(int coarse, int fine) { return one(coarse) + one(fine); }

at::Tensor images_upto(int64_t count) {
  at::Tensor images = at::empty({count, kImageBytes}, at::kByte);
  uint8_t* byte = images.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t p = 0; p < kImageBytes; ++p) *byte++ = pixel(i, p);
  }
  return images.view({count, 3, 32, 32});
}

// Writes five files of one to five records: 15 images of labels 0, 1, ..., 9, 0, ...
void write_cifar10_train(const TemporaryFolder& folder) {
  int64_t image = 0;
  for (int64_t file = 1; file <= 5; ++file) {
    std::vector<std::string> labels;
    for (int64_t i = 0; i < file; ++i) labels.push_back(one(static_cast<int>((image + i) % 10)));
    folder.write("data_batch_" + std::to_string(file) + ".bin", records(labels, image));
    image += file;
  }
}

}  // namespace

TEST_CASE("CIFAR-10's batches are read one after the other", "[examples][pure]") {
  const TemporaryFolder folder;
  write_cifar10_train(folder);
  const auto data = read_cifar10(folder.path(), "train");
  CHECK(torch::equal(data.images, images_upto(15)));
  CHECK(data.images.is_contiguous());
  CHECK(torch::equal(data.labels, torch::arange(15) % 10));
}

TEST_CASE("CIFAR-10's test images come only from test_batch.bin", "[examples][pure]") {
  const TemporaryFolder folder;
  folder.write("test_batch.bin", records({one(9), one(0)}));
  const auto data = read_cifar10(folder.path(), "test");
  CHECK(torch::equal(data.images, images_upto(2)));
  CHECK(torch::equal(data.labels, torch::tensor({9, 0})));
}

TEST_CASE("the first third of a record is red, row by row", "[examples][pure]") {
  const TemporaryFolder folder;
  std::string bytes = one(3) + std::string(1024, '\xff') + std::string(2048, '\0');
  bytes[1 + 1024 + 32 * 2 + 5] = 9;  // green, row 2, column 5
  folder.write("test_batch.bin", bytes);
  const auto image = read_cifar10(folder.path(), "test").images[0];
  CHECK(image[0].eq(255).all().item<bool>());
  CHECK(image[1][2][5].item<int>() == 9);
  CHECK(image.slice(0, 1).sum().item<int>() == 9);
}

TEST_CASE("CIFAR-100 gives fine labels or coarse ones", "[examples][pure]") {
  const TemporaryFolder folder;
  folder.write("train.bin", records({coarse_and_fine(19, 99), coarse_and_fine(0, 42)}));
  folder.write("test.bin", records({coarse_and_fine(7, 0)}));
  const auto fine = read_cifar100(folder.path(), "train");
  CHECK(torch::equal(fine.images, images_upto(2)));
  CHECK(fine.images.is_contiguous());
  CHECK(torch::equal(fine.labels, torch::tensor({99, 42})));
  const auto coarse = read_cifar100(folder.path(), "train", CifarLabels::kCoarse);
  CHECK(torch::equal(coarse.images, fine.images));
  CHECK(torch::equal(coarse.labels, torch::tensor({19, 0})));

  const auto test = read_cifar100(folder.path(), "test", CifarLabels::kCoarse);
  CHECK(torch::equal(test.images, images_upto(1)));
  CHECK(torch::equal(test.labels, torch::tensor({7})));
}

TEST_CASE("batches of CIFAR are normalized by channel", "[examples][pure]") {
  const TemporaryFolder folder;
  write_cifar10_train(folder);
  const auto data = read_cifar10(folder.path(), "train");
  examples::ImageDataset dataset(data, examples::measure_channels(data.images), /*size=*/32);
  CHECK(dataset.size() == 15);

  const auto scaled = data.images.to(torch::kDouble) / 255;
  const auto mean = scaled.mean({0, 2, 3}, /*keepdim=*/true);
  const auto stddev = scaled.std({0, 2, 3}, /*unbiased=*/false, /*keepdim=*/true);
  const auto expected = (scaled - mean) / stddev;
  const auto batch = dataset.get_batch(std::vector<size_t>{14, 3, 3});
  CHECK(batch.data.sizes() == at::IntArrayRef({3, 3, 32, 32}));
  CHECK(batch.data.dtype() == torch::kFloat);
  const auto rows = torch::tensor({14, 3, 3});
  CHECK(torch::allclose(batch.data, expected.index_select(0, rows).to(torch::kFloat), 0, 1e-5));
  CHECK(torch::equal(batch.target, torch::tensor({4, 3, 3})));
}

TEST_CASE("a missing CIFAR file is named, with what to do", "[examples][errors]") {
  const TemporaryFolder folder;
  const auto read10 = [&] { read_cifar10(folder.path(), "train"); };
  const auto read100 = [&] { read_cifar100(folder.path(), "test"); };
  const auto missing10 = folder.file("data_batch_1.bin") +
                         ": expected a file of CIFAR-10, found none (No such file or directory). ";
  const auto missing100 =
      folder.file("test.bin") +
      ": expected a file of CIFAR-100, found none (No such file or directory). ";

  SECTION("no file exists") {
    CHECK(
        error_of<c10::ValueError>(read10) ==
        missing10 +
            "Pass a folder with the binary version of CIFAR-10, as "
            "scripts/download_cifar.sh makes it.");
    CHECK(
        error_of<c10::ValueError>(read100) ==
        missing100 +
            "Pass a folder with the binary version of CIFAR-100, as "
            "scripts/download_cifar.sh --100 makes it.");
  }
  SECTION("a later batch does not exist") {
    write_cifar10_train(folder);
    const auto fourth = folder.file("data_batch_4.bin");
    REQUIRE(std::remove(fourth.c_str()) == 0);
    CHECK_THAT(
        error_of<c10::ValueError>(read10),
        ContainsText(fourth + ": expected a file of CIFAR-10, found none"));
  }
  SECTION("a folder has its name") {
    const auto taken = folder.file("data_batch_1.bin");
    REQUIRE(mkdir(taken.c_str(), 0700) == 0);
    CHECK_THAT(
        error_of<c10::ValueError>(read10),
        ContainsText(taken + ": expected a file of CIFAR-10, found none (Is a directory)"));
  }
  SECTION("the archive was not unpacked") {
    const auto ten = folder.write("cifar-10-binary.tar.gz", "packed");
    CHECK(
        error_of<c10::ValueError>(read10) == missing10 + "Unpack " + ten + " with tar -xzf " + ten +
                                                 " -C " + folder.path() + " and pass " +
                                                 folder.file("cifar-10-batches-bin") + ".");
    const auto hundred = folder.write("cifar-100-binary.tar.gz", "packed");
    CHECK(
        error_of<c10::ValueError>(read100) == missing100 + "Unpack " + hundred + " with tar -xzf " +
                                                  hundred + " -C " + folder.path() + " and pass " +
                                                  folder.file("cifar-100-binary") + ".");
  }
  SECTION("the archive was unpacked there") {
    folder.write("cifar-10-binary.tar.gz", "packed");
    REQUIRE(mkdir(folder.file("cifar-10-batches-bin").c_str(), 0700) == 0);
    folder.write("cifar-10-batches-bin/data_batch_1.bin", "");
    CHECK(
        error_of<c10::ValueError>(read10) ==
        missing10 + "Pass " + folder.file("cifar-10-batches-bin") + ", which has it.");
  }
  SECTION("the folder holds the other data set") {
    folder.write("test_batch.bin", "");
    CHECK(
        error_of<c10::ValueError>(read100) ==
        missing100 +
            "The folder has test_batch.bin, a name of CIFAR-10's files: read "
            "it as that, or pass one of CIFAR-100.");
    folder.write("train.bin", "");
    CHECK(
        error_of<c10::ValueError>(read10) ==
        missing10 +
            "The folder has train.bin, a name of CIFAR-100's files: read it "
            "as that, or pass one of CIFAR-10.");
  }
}

TEST_CASE("a damaged CIFAR file is refused, with what to do", "[examples][errors]") {
  struct Bad {
    int classes;  // 10 or 100
    std::string bytes;
    std::string text;  // after the path
  };
  const std::string record_of_10 = "3073 bytes (CIFAR-10: a label and 3072 bytes of pixels)";
  const std::string record_of_100 =
      "3074 bytes (CIFAR-100: a coarse label, a fine label and 3072 bytes of pixels)";
  const std::string cut = "The file is cut short or too long: fetch it again with ";
  const std::string damaged_100 =
      "The file is damaged or not of CIFAR-100: fetch it again with "
      "scripts/download_cifar.sh --100.";
  const std::vector<Bad> files{
      {10, "",
       ": expected records of " + record_of_10 +
           ", found an empty file. Fetch it again with scripts/download_cifar.sh."},
      {10, records({one(1), one(2)}).substr(0, 6145),
       ": expected records of " + record_of_10 +
           ", found 6145 bytes: 1 records and 3072 bytes more. " + cut +
           "scripts/download_cifar.sh."},
      {100, records({coarse_and_fine(1, 2)}) + "more",
       ": expected records of " + record_of_100 +
           ", found 3078 bytes: 1 records and 4 bytes more. " + cut +
           "scripts/download_cifar.sh --100."},
      // Files of the other data set, by their size.
      {10, records({coarse_and_fine(1, 2), coarse_and_fine(3, 4)}),
       ": expected records of " + record_of_10 +
           ", found 6148 bytes: 2 records of CIFAR-100 (3074 bytes: a coarse label, a fine label "
           "and 3072 bytes of pixels). Read it as that, or fetch CIFAR-10 with "
           "scripts/download_cifar.sh."},
      {100, records({one(1), one(2), one(3)}),
       ": expected records of " + record_of_100 +
           ", found 9219 bytes: 3 records of CIFAR-10 (3073 bytes: a label and 3072 bytes of "
           "pixels). Read it as that, or fetch CIFAR-100 with scripts/download_cifar.sh --100."},
      {10, records({one(9), one(0), one(10)}),
       ": expected labels from 0 to 9, found 10 at position 2. The file is damaged or not of "
       "CIFAR-10: fetch it again with scripts/download_cifar.sh."},
      {100, records({coarse_and_fine(19, 99), coarse_and_fine(0, 100)}),
       ": expected fine labels from 0 to 99, found 100 at position 1. " + damaged_100},
      {100, records({coarse_and_fine(20, 0)}),
       ": expected coarse labels from 0 to 19, found 20 at position 0. " + damaged_100},
      {100, records({coarse_and_fine(0, 255)}),
       ": expected fine labels from 0 to 99, found 255 at position 0. " + damaged_100}};
  // Both labels are checked, whichever one is asked for.
  const auto asked = GENERATE(CifarLabels::kFine, CifarLabels::kCoarse);
  const TemporaryFolder folder;
  for (const auto& [classes, bytes, text] : files) {
    const auto path = folder.write(classes == 10 ? "test_batch.bin" : "test.bin", bytes);
    const auto error = error_of<c10::ValueError>([&, classes = classes] {
      classes == 10 ? read_cifar10(folder.path(), "test")
                    : read_cifar100(folder.path(), "test", asked);
    });
    CHECK(error == path + text);
  }
}

TEST_CASE("a split that CIFAR does not have is refused", "[examples][errors]") {
  const TemporaryFolder folder;
  CHECK(error_of<c10::ValueError>([&] {
          read_cifar10(folder.path(), "t10k");
        }) == "CIFAR-10: expected the split \"train\" or \"test\", found \"t10k\".");
  CHECK_THAT(
      error_of<c10::ValueError>([&] { read_cifar100(folder.path(), ""); }),
      ContainsText("CIFAR-100: expected the split \"train\" or \"test\", found \"\"."));
}
