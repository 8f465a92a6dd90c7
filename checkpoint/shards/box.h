#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>

namespace ddp {

/// Returns the elements that two boxes of one tensor share; nothing where there are none.
std::optional<TensorBox> intersection(const TensorBox& a, const TensorBox& b);

/// Two boxes that share elements.
struct Overlap {
  size_t first = 0, second = 0;  // in the list of boxes
  TensorBox common;
};

/// Returns two boxes of one tensor that overlap; nothing where none do.
///
/// \param compared  becomes the number of pairs that were compared; null: none asks.
///
/// Cost: n log n for n boxes of a grid, and for those that planes divide.
std::optional<Overlap> find_overlap(
    const std::vector<const TensorBox*>& boxes, int64_t* compared = nullptr);

/// Elements that follow each other in memory.
struct ElementRun {
  int64_t first = 0;
  int64_t count = 0;
};

/// Lists where the elements of `part` are in `whole`, which lies row by row, in the order of a
/// `part` that lies row by row.
///
/// \param part  lies within `whole`, and has an element.
std::vector<ElementRun> runs_of(const TensorBox& part, const TensorBox& whole);

/// Returns the view of a tensor's elements that `box` names.
///
/// \param offset  where the tensor begins in the whole one.
at::Tensor box_view(
    const at::Tensor& tensor, const std::vector<int64_t>& offset, const TensorBox& box);

/// The same of a whole tensor.
at::Tensor box_view(const at::Tensor& whole, const TensorBox& box);

/// Whether a box lies within a tensor of `sizes`.
bool is_within(const TensorBox& box, const std::vector<int64_t>& sizes);

/// Writes "[0:512, 16:32]".
std::string box_text(const TensorBox& box);

}  // namespace ddp
