#include "shards/box.h"

#include <algorithm>

#include <ddp/internal/text.h>

namespace ddp {

std::optional<TensorBox> intersection(const TensorBox& a, const TensorBox& b) {
  TensorBox common;
  for (size_t d = 0; d < a.size.size(); ++d) {
    const auto begin = std::max(a.offset[d], b.offset[d]);
    const auto end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.size.push_back(end - begin);
  }
  return common;
}

std::optional<Overlap> find_overlap(const std::vector<const TensorBox*>& boxes) {
  // A box that begins after another one's rows shares none with it, nor do those after it.
  const auto is_past = [](const TensorBox& box, const TensorBox& other) {
    return !box.size.empty() && other.offset[0] >= box.offset[0] + box.size[0];
  };
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t j = i + 1; j < boxes.size() && !is_past(*boxes[i], *boxes[j]); ++j) {
      if (auto common = intersection(*boxes[i], *boxes[j])) return Overlap{i, j, *common};
    }
  }
  return std::nullopt;
}

std::vector<ElementRun> runs_of(const TensorBox& part, const TensorBox& whole) {
  const size_t dims = whole.size.size();
  std::vector<int64_t> strides(dims, 1);
  for (size_t d = dims; d-- > 1;) strides[d - 1] = strides[d] * whole.size[d];
  // A run spans the last dimensions of which `part` has all, and one more.
  size_t first = dims;
  int64_t count = 1;
  while (first > 0) {
    --first;
    count *= part.size[first];
    if (part.size[first] != whole.size[first]) break;
  }
  int64_t begin = 0;
  for (size_t d = 0; d < dims; ++d) begin += (part.offset[d] - whole.offset[d]) * strides[d];
  std::vector<ElementRun> runs{{begin, count}};
  for (size_t d = 0; d < first; ++d) {
    std::vector<ElementRun> finer;
    for (const auto& run : runs) {
      for (int64_t i = 0; i < part.size[d]; ++i)
        finer.push_back({run.first + i * strides[d], count});
    }
    runs = std::move(finer);
  }
  return runs;
}

at::Tensor box_view(
    const at::Tensor& tensor, const std::vector<int64_t>& offset, const TensorBox& box) {
  auto view = tensor;
  for (size_t d = 0; d < box.size.size(); ++d) {
    view = view.narrow(static_cast<int64_t>(d), box.offset[d] - offset[d], box.size[d]);
  }
  return view;
}

at::Tensor box_view(const at::Tensor& whole, const TensorBox& box) {
  return box_view(whole, std::vector<int64_t>(box.size.size(), 0), box);
}

bool is_within(const TensorBox& box, const std::vector<int64_t>& sizes) {
  bool fits = box.offset.size() == sizes.size() && box.size.size() == sizes.size();
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    fits = box.offset[d] >= 0 && box.size[d] >= 0 && box.offset[d] <= sizes[d] &&
           box.size[d] <= sizes[d] - box.offset[d];
  }
  return fits;
}

std::string box_text(const TensorBox& box) {
  std::vector<std::string> ranges;
  for (size_t d = 0; d < box.size.size(); ++d) {
    ranges.push_back(ddp::str(box.offset[d], ":", box.offset[d] + box.size[d]));
  }
  return ddp::str("[", joined_by(", ", ranges), "]");
}

}  // namespace ddp
