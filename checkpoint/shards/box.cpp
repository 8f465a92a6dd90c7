#include "shards/box.h"

#include <algorithm>
#include <utility>

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

namespace {

/// Looks for two boxes that overlap. Planes that no box crosses divide the boxes until each pair of
/// the rest has to be compared: cuts of a tensor over ranks lie in a grid, so none is left.
class OverlapSearch {
 public:
  explicit OverlapSearch(const std::vector<const TensorBox*>& boxes) : boxes_(boxes) {}

  std::optional<Overlap> run() {
    std::vector<size_t> all;
    for (size_t i = 0; i < boxes_.size(); ++i) {
      const auto& size = boxes_[i]->size;
      if (std::find(size.begin(), size.end(), 0) == size.end()) all.push_back(i);
    }
    return search(std::move(all), 0, 0);
  }

  int64_t compared() const { return compared_; }

 private:
  /// \param dim  along which planes are tried next. \param in_vain  dimensions before it, in a row.
  std::optional<Overlap> search(std::vector<size_t> some, size_t dim, size_t in_vain) {
    constexpr size_t kFew = 4;
    const size_t dims = boxes_.front()->size.size();
    if (some.size() <= kFew || in_vain == dims) return compare_pairs(std::move(some));
    auto groups = divided(std::move(some), dim);
    const size_t next = (dim + 1) % dims;
    if (groups.size() == 1) return search(std::move(groups.front()), next, in_vain + 1);
    for (auto& group : groups) {
      if (auto overlap = search(std::move(group), next, 0)) return overlap;
    }
    return std::nullopt;
  }

  std::vector<std::vector<size_t>> divided(std::vector<size_t> some, size_t dim) const {
    std::sort(some.begin(), some.end(), [&](size_t a, size_t b) {
      return boxes_[a]->offset[dim] < boxes_[b]->offset[dim];
    });
    std::vector<std::vector<size_t>> groups;
    int64_t end = 0;  // of all boxes of the last group
    for (const size_t i : some) {
      const auto& box = *boxes_[i];
      if (groups.empty() || box.offset[dim] >= end) groups.emplace_back();
      groups.back().push_back(i);
      end = std::max(end, box.offset[dim] + box.size[dim]);
    }
    return groups;
  }

  std::optional<Overlap> compare_pairs(std::vector<size_t> some) {
    std::sort(some.begin(), some.end());
    for (size_t i = 0; i < some.size(); ++i) {
      for (size_t j = i + 1; j < some.size(); ++j) {
        ++compared_;
        if (auto common = intersection(*boxes_[some[i]], *boxes_[some[j]])) {
          return Overlap{some[i], some[j], *std::move(common)};
        }
      }
    }
    return std::nullopt;
  }

  const std::vector<const TensorBox*>& boxes_;
  int64_t compared_ = 0;
};

}  // namespace

std::optional<Overlap> find_overlap(const std::vector<const TensorBox*>& boxes, int64_t* compared) {
  if (boxes.empty()) return std::nullopt;
  OverlapSearch search(boxes);
  auto overlap = search.run();
  if (compared != nullptr) *compared = search.compared();
  return overlap;
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
