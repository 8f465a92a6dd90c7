// Where the elements of a parameter are, whichever way it is cut over the ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/process_group.h>

namespace ddp {

/// A part of a tensor: indices [offset[d], offset[d] + size[d]) of each dimension d. Without
/// dimensions: the one element.
struct Box {
  std::vector<int64_t> offset, size;
};

/// Elements [begin, end) of a box, counted along its last dimension first, as boxes in that order:
/// at most 2 d - 1 for d >= 1 dimensions.
///
/// \param begin  >= 0. \param end  at most the number of the box's elements.
std::vector<Box> boxes_of(const Box& box, int64_t begin, int64_t end);

/// The elements of one parameter that this rank has.
struct ParameterLayout {
  std::string name;            // in the whole model
  std::vector<int64_t> sizes;  // of the whole parameter
  at::ScalarType dtype;
  at::Tensor local;
  std::vector<Box> boxes;  // of the whole: the elements of `local`, in the order of its memory
  std::vector<ProcessGroup> sharded_over;     // their ranks have other elements
  std::vector<ProcessGroup> replicated_over;  // their ranks have the same elements
};

}  // namespace ddp
