#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

/// The axes of a mesh, and where ranks lie in it: row-major, so that ranks that differ by one lie
/// side by side on the last axis.
struct MeshShape {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;

  int64_t product() const;
  std::vector<int> coordinate_of(int rank) const;
  /// \param coordinate  one number an axis, below its size.
  int rank_at(const std::vector<int>& coordinate) const;
  /// The ranks whose coordinates differ from `rank`'s on these axes at most, in row-major order.
  ///
  /// \param axes  ascending.
  std::vector<int> ranks_along(const std::vector<size_t>& axes, int rank) const;
  /// The index of an axis; names.size() if there is none of that name.
  size_t find(const std::string& name) const;

  /// "{2, 4} of dp, tp".
  std::string to_text() const;
  /// "dp 1, tp 0".
  std::string coordinate_text(int rank) const;
};

}  // namespace ddp
