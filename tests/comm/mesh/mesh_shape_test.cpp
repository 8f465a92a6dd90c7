#include <numeric>
#include <vector>

#include "comm/mesh/mesh_shape.h"

#include "support/catch.h"

using ddp::MeshShape;

TEST_CASE("coordinates and ranks of a mesh are each other's inverse", "[comm][mesh]") {
  const auto sizes = GENERATE(
      std::vector<int64_t>{1}, std::vector<int64_t>{5}, std::vector<int64_t>{2, 3},
      std::vector<int64_t>{2, 1, 4}, std::vector<int64_t>{3, 2, 2, 2});
  MeshShape shape{sizes, {}};
  for (size_t axis = 0; axis < sizes.size(); ++axis) shape.names.push_back(std::to_string(axis));
  for (int rank = 0; rank < shape.product(); ++rank) {
    CHECK(shape.rank_at(shape.coordinate_of(rank)) == rank);
  }
}

TEST_CASE("the last axis of a mesh is the fastest", "[comm][mesh]") {
  // Of torch 2.11.0: DeviceMesh("cpu", arange(12).view(2, 3, 2)).get_coordinate() on each rank.
  const MeshShape shape{{2, 3, 2}, {"pp", "dp", "tp"}};
  CHECK(shape.coordinate_of(0) == std::vector<int>{0, 0, 0});
  CHECK(shape.coordinate_of(1) == std::vector<int>{0, 0, 1});
  CHECK(shape.coordinate_of(2) == std::vector<int>{0, 1, 0});
  CHECK(shape.coordinate_of(7) == std::vector<int>{1, 0, 1});
  CHECK(shape.coordinate_of(11) == std::vector<int>{1, 2, 1});
  CHECK(shape.coordinate_text(7) == "pp 1, dp 0, tp 1");
  CHECK(shape.to_text() == "{2, 3, 2} of pp, dp, tp");
}

TEST_CASE("ranks along axes are in row-major order", "[comm][mesh]") {
  const MeshShape shape{{2, 3, 2}, {"pp", "dp", "tp"}};
  CHECK(shape.ranks_along({0}, 3) == std::vector<int>{3, 9});
  CHECK(shape.ranks_along({1}, 3) == std::vector<int>{1, 3, 5});
  CHECK(shape.ranks_along({2}, 3) == std::vector<int>{2, 3});
  CHECK(shape.ranks_along({0, 2}, 3) == std::vector<int>{2, 3, 8, 9});
  CHECK(shape.ranks_along({1, 2}, 6) == std::vector<int>{6, 7, 8, 9, 10, 11});
  std::vector<int> all(12);
  std::iota(all.begin(), all.end(), 0);
  CHECK(shape.ranks_along({0, 1, 2}, 5) == all);
}
