#include <ddp/parameter_layout.h>

namespace ddp {
namespace {

// Appends elements [begin, end) of `box`, whose dimensions before `dim` have size 1.
void append_boxes(std::vector<Box>& boxes, const Box& box, size_t dim, int64_t begin, int64_t end) {
  if (begin == end) return;
  int64_t row = 1;  // elements of one index of `dim`
  for (size_t d = dim + 1; d < box.size.size(); ++d) row *= box.size[d];
  const auto rows = [&](int64_t first, int64_t last) {
    auto part = box;
    part.offset[dim] += first;
    part.size[dim] = last - first;
    return part;
  };
  const auto first = begin / row;
  const auto last = end / row;
  if (first == last) {
    append_boxes(boxes, rows(first, first + 1), dim + 1, begin % row, end % row);
    return;
  }
  const auto first_whole = (begin + row - 1) / row;
  if (first < first_whole) append_boxes(boxes, rows(first, first_whole), dim + 1, begin % row, row);
  if (first_whole < last) boxes.push_back(rows(first_whole, last));
  append_boxes(boxes, rows(last, last + 1), dim + 1, 0, end % row);
}

}  // namespace

std::vector<Box> boxes_of(const Box& box, int64_t begin, int64_t end) {
  if (box.size.empty() && begin < end) return {box};
  std::vector<Box> boxes;
  append_boxes(boxes, box, 0, begin, end);
  return boxes;
}

}  // namespace ddp
