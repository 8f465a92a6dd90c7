#include <ddp/parameter_layout.h>

#include <algorithm>
#include <random>
#include <vector>

#include "shard/box_elements.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::elements_of;
using Shape = std::vector<int64_t>;

int64_t product(const Shape& shape) {
  int64_t product = 1;
  for (const auto size : shape) product *= size;
  return product;
}

}  // namespace

TEST_CASE("a flat range of a box is a few boxes, in its order", "[shard][pure]") {
  std::minstd_rand random(1);
  std::vector<size_t> most(5);
  for (int round = 0; round < 4000; ++round) {
    const size_t dimensions = random() % 5;
    Shape whole;
    TensorBox box;
    for (size_t d = 0; d < dimensions; ++d) {
      box.offset.push_back(random() % 3);
      box.size.push_back(random() % 5);
      whole.push_back(box.offset[d] + box.size[d] + random() % 3);
    }
    const auto all = elements_of(box, whole);
    const auto numel = product(box.size);
    auto begin = static_cast<int64_t>(random() % (numel + 1));
    auto end = begin + static_cast<int64_t>(random() % (numel - begin + 1));
    if (round % 4 == 0 && numel > 1) {  // cuts the first and the last row of each dimension
      begin = 1;
      end = numel - 1;
    }
    CAPTURE(whole, box.offset, box.size, begin, end);
    const auto boxes = boxes_of(box, begin, end);
    Shape elements;
    for (const auto& part : boxes) {
      const auto more = elements_of(part, whole);
      CHECK(!more.empty());
      elements.insert(elements.end(), more.begin(), more.end());
    }
    CHECK(elements == Shape(all.begin() + begin, all.begin() + end));
    most[dimensions] = std::max(most[dimensions], boxes.size());
  }
  CHECK(most == std::vector<size_t>{1, 1, 3, 5, 7});
}

}  // namespace ddp
