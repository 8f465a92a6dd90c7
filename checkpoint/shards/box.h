#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ddp {

/// A range of elements in each dimension of a tensor. Without dimensions: the one element.
struct ShardBox {
  std::vector<int64_t> offset, size;
};

/// Counts the elements of a shape.
int64_t elements_of(const std::vector<int64_t>& size);

/// Returns the elements that two boxes of one tensor share; nothing where there are none.
std::optional<ShardBox> intersection(const ShardBox& a, const ShardBox& b);

/// Elements that follow each other in memory.
struct ElementRun {
  int64_t first = 0;
  int64_t count = 0;
};

/// Lists where the elements of `part` are in `whole`, which lies row by row, in the order of a
/// `part` that lies row by row.
///
/// \param part  lies within `whole`, and has an element.
std::vector<ElementRun> runs_of(const ShardBox& part, const ShardBox& whole);

/// Writes "[0:512, 16:32]".
std::string box_text(const ShardBox& box);

}  // namespace ddp
