#include "mesh/mesh_shape.h"

#include <algorithm>

#include <ddp/internal/text.h>

namespace ddp {

int64_t MeshShape::product() const {
  int64_t all = 1;
  for (const int64_t size : sizes) all *= size;
  return all;
}

std::vector<int> MeshShape::coordinate_of(int rank) const {
  std::vector<int> coordinate(sizes.size());
  int64_t rest = rank;
  for (size_t axis = sizes.size(); axis-- > 0; rest /= sizes[axis]) {
    coordinate[axis] = static_cast<int>(rest % sizes[axis]);
  }
  return coordinate;
}

int MeshShape::rank_at(const std::vector<int>& coordinate) const {
  int64_t rank = 0;
  for (size_t axis = 0; axis < sizes.size(); ++axis) rank = rank * sizes[axis] + coordinate[axis];
  return static_cast<int>(rank);
}

std::vector<int> MeshShape::ranks_along(const std::vector<size_t>& axes, int rank) const {
  std::vector<int> ranks{rank};
  for (const size_t axis : axes) {
    std::vector<int> longer;
    for (const int before : ranks) {
      auto coordinate = coordinate_of(before);
      for (int place = 0; place < sizes[axis]; ++place) {
        coordinate[axis] = place;
        longer.push_back(rank_at(coordinate));
      }
    }
    ranks = std::move(longer);
  }
  return ranks;
}

size_t MeshShape::find(const std::string& name) const {
  return static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
}

std::string MeshShape::to_text() const {
  return ddp::str('{', joined_by(", ", sizes), "} of ", joined_by(", ", names));
}

std::string MeshShape::coordinate_text(int rank) const {
  const auto coordinate = coordinate_of(rank);
  std::string text;
  for (size_t axis = 0; axis < names.size(); ++axis) {
    text += ddp::str(axis > 0 ? ", " : "", names[axis], ' ', coordinate[axis]);
  }
  return text;
}

}  // namespace ddp
