#include "examples/common/data/data_file.h"

#include <string>

#include <torch/torch.h>

#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

using ddp::testing::error_of;
using ddp::testing::TemporaryFolder;
using examples::DataFile;

}  // namespace

TEST_CASE("a data file is read from its front", "[examples][pure]") {
  const TemporaryFolder folder;
  DataFile file(folder.write("data", std::string("\x01\x02\x03\xff\x05", 5)), "a file", "");
  CHECK(file.size() == 5);
  char first = 0;
  file.read(&first, 1);
  CHECK(first == 1);
  const auto expected = torch::tensor({2, 3, 255, 5}, torch::kByte).view({2, 2});
  CHECK(torch::equal(file.read_tensor({2, 2}), expected));
}

TEST_CASE("a data file that got shorter since it was opened is refused", "[examples][errors]") {
  const TemporaryFolder folder;
  const auto path = folder.write("data", "12345");
  DataFile file(path, "a file", "");
  folder.write("data", "123");
  CHECK(error_of<c10::ValueError>([&] {
          file.read_tensor({5});
        }) == path + ": expected to read 5 bytes, found 3. Is another program writing it?");
}

TEST_CASE("a path that is not a file does not count as one", "[examples][pure]") {
  const TemporaryFolder folder;
  CHECK(examples::is_file(folder.write("data", "")));
  CHECK_FALSE(examples::is_file(folder.file("nothing")));
  CHECK_FALSE(examples::is_file(folder.path()));
}

TEST_CASE("a label below zero is out of range, too", "[examples][errors]") {
  const auto labels = torch::tensor({0, 9, -1, 10});
  CHECK(
      error_of<c10::ValueError>([&] {
        examples::check_labels(labels, 10, "labels.bin", "fine labels", " Fetch it again.");
      }) ==
      "labels.bin: expected fine labels from 0 to 9, found -1 at position 2. Fetch it again.");
  CHECK(error_of<c10::ValueError>([&] {
          examples::check_labels(labels.slice(0, 0, 2), 10, "labels.bin");
        }).empty());
}
