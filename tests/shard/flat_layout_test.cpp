#include <ddp/internal/flat_parameters.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support/catch.h"

namespace ddp {
namespace {

/// How often the ranks' pieces cover each element, by tensor.
std::vector<std::vector<int>> coverage(const std::vector<int64_t>& numels, int ranks) {
  const FlatLayout layout(numels, ranks);
  std::vector<std::vector<int>> counts;
  for (const auto n : numels) counts.emplace_back(n, 0);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& piece : layout.pieces(rank)) {
      CHECK(piece.numel > 0);
      CHECK(piece.at + piece.numel <= layout.shard_numel);
      CHECK(layout.offsets[piece.slot] + piece.from == rank * layout.shard_numel + piece.at);
      for (int64_t i = 0; i < piece.numel; ++i) ++counts[piece.slot].at(piece.from + i);
    }
  }
  return counts;
}

}  // namespace

TEST_CASE("shards cover every element once", "[shard][pure]") {
  std::minstd_rand random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> numels(1 + random() % 6);
    for (auto& n : numels) n = random() % 4 == 0 ? random() % 2 : random() % 60;
    const auto ranks = static_cast<int>(1 + random() % 12);
    CAPTURE(numels, ranks);
    const auto counts = coverage(numels, ranks);
    for (size_t i = 0; i < numels.size(); ++i) CHECK(counts[i] == std::vector<int>(numels[i], 1));
  }
}

TEST_CASE("shards are multiples of four elements, with the least padding", "[shard][pure]") {
  for (const int ranks : {1, 2, 3, 8, 40}) {
    for (const int64_t numel : {0, 1, 23, 24, 25, 96, 1000}) {
      const FlatLayout layout({numel}, ranks);
      CHECK(layout.shard_numel % 4 == 0);
      CHECK(layout.numel() == layout.shard_numel * ranks);
      CHECK(layout.numel() == numel + layout.padding());
      CHECK(layout.padding() >= 0);
      CHECK(layout.padding() < 4 * ranks);
    }
  }
}

TEST_CASE("whole tensors lie in one shard each, and the largest shard is small", "[shard][pure]") {
  std::minstd_rand random(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> numels(1 + random() % 9);
    for (auto& n : numels) n = random() % 60;
    std::vector<int64_t> loads(1 + random() % 5);
    for (auto& load : loads) load = random() % 9;
    const auto before = loads;
    CAPTURE(numels, loads);
    const auto layout = FlatLayout::of_whole_tensors(numels, loads);
    int64_t all = 0, largest = 0, sum = 0;
    for (const auto n : numels) largest = std::max(largest, n);
    for (const auto n : numels) all += n;
    for (int rank = 0; rank < layout.ranks; ++rank) {
      int64_t end = 0;
      for (const auto& piece : layout.pieces(rank)) {
        CHECK(piece.from == 0);
        CHECK(piece.numel == numels[piece.slot]);
        CHECK(layout.offsets[piece.slot] == rank * layout.shard_numel + piece.at);
        end += piece.numel;
      }
      CHECK(end == loads[static_cast<size_t>(rank)] - before[static_cast<size_t>(rank)]);
      sum += end;
    }
    CHECK(sum == all);
    CHECK(layout.shard_numel <= all / layout.ranks + largest + 4);
    CHECK(layout.padding() == layout.numel() - all);
  }
}

}  // namespace ddp
