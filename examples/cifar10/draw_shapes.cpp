// draw_shapes FOLDER [TRAIN_IMAGES TEST_IMAGES]: makes a data set of drawn shapes in CIFAR-10's
// format, on which the example can train without a network connection.
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>

#include <c10/util/Exception.h>

#include "shapes.h"

namespace {

void draw(const std::string& folder, int64_t train, int64_t test) {
  TORCH_CHECK(
      mkdir(folder.c_str(), 0777) == 0 || errno == EEXIST, folder,
      ": expected to make a folder, got ", std::strerror(errno), ".");
  constexpr int kParts = 5;
  for (int part = 1; part <= kParts; ++part) {
    cifar10::write_cifar10(
        cifar10::draw_shapes(train / kParts, /*seed=*/part),
        folder + "/data_batch_" + std::to_string(part) + ".bin");
  }
  cifar10::write_cifar10(
      cifar10::draw_shapes(test, /*seed=*/kParts + 1), folder + "/test_batch.bin");
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t train = argc > 3 ? std::atoll(argv[2]) : 5000;
  const int64_t test = argc > 3 ? std::atoll(argv[3]) : 1000;
  if ((argc != 2 && argc != 4) || argv[1][0] == '-' || train < 5 || test < 1) {
    std::cerr << "usage: draw_shapes FOLDER [TRAIN_IMAGES TEST_IMAGES], at least 5 and 1\n";
    return 2;
  }
  try {
    draw(argv[1], train, test);
  } catch (const c10::Error& error) {
    std::cerr << "draw_shapes: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "draw_shapes: " << error.what() << '\n';
    return 1;
  }
}
