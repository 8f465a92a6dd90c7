#include "sampler/shard.h"

#include <fstream>
#include <ios>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"

namespace {

using Indices = std::vector<size_t>;

ddp::ShardSpec spec(int64_t dataset_size, int64_t num_replicas, int64_t rank) {
  ddp::ShardSpec result;
  result.dataset_size = dataset_size;
  result.num_replicas = num_replicas;
  result.rank = rank;
  return result;
}

Indices shuffled(int64_t size, int64_t replicas, int64_t rank, int64_t seed, int64_t epoch) {
  auto s = spec(size, replicas, rank);
  s.seed = seed;
  s.epoch = epoch;
  return shard_indices(s);
}

Indices in_order(int64_t size, int64_t replicas, int64_t rank, bool drop_last = false) {
  auto s = spec(size, replicas, rank);
  s.shuffle = false;
  s.drop_last = drop_last;
  return shard_indices(s);
}

Indices head(const Indices& indices, size_t count) {
  return Indices(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(count));
}

// One step of FNV-1a over 64-bit words: as in record_python_sampler.py.
uint64_t fold(uint64_t state, uint64_t value) { return (state ^ value) * 0x100000001B3; }

}  // namespace

TEST_CASE("one rank visits torch's permutation", "[sampler][pure]") {
  CHECK(shuffled(10, 1, 0, 0, 0) == Indices{4, 1, 7, 5, 3, 9, 0, 8, 6, 2});
  CHECK(shuffled(10, 1, 0, 1, 0) == Indices{5, 6, 1, 2, 0, 8, 9, 3, 7, 4});
}

TEST_CASE("torch changes its permutation's algorithm with the size", "[sampler][pure]") {
  CHECK(head(shuffled(20000, 1, 0, 0, 0), 4) == Indices{16044, 15558, 2137, 17756});
  CHECK(head(shuffled(40000, 1, 0, 0, 0), 4) == Indices{16044, 31897, 28527, 5740});
}

TEST_CASE(
    "ranks take turns in the shuffled order, which starts over to come out even",
    "[sampler][pure]") {
  CHECK(shuffled(10, 3, 0, 0, 0) == Indices{4, 5, 0, 2});
  CHECK(shuffled(10, 3, 1, 0, 0) == Indices{1, 3, 8, 4});
  CHECK(shuffled(10, 3, 2, 0, 0) == Indices{7, 9, 6, 1});
  CHECK(shuffled(10, 3, 0, 0, 1) == Indices{5, 2, 9, 4});
  CHECK(shuffled(10, 3, 0, 0, 2) == Indices{8, 5, 0, 3});
}

TEST_CASE("the seed and the epoch are added", "[sampler][pure]") {
  CHECK(shuffled(10, 3, 1, 0, 1) == shuffled(10, 3, 1, 1, 0));
  CHECK(shuffled(10, 3, 1, -1, 1) == shuffled(10, 3, 1, 0, 0));
  CHECK(shuffled(10, 3, 1, 0, 1) != shuffled(10, 3, 1, 0, 0));
}

TEST_CASE("drop_last drops the tail of the shuffled order", "[sampler][pure]") {
  const Indices expected[] = {{2, 8, 0}, {6, 4, 9}, {1, 5, 3}};
  for (int64_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    auto s = spec(10, 3, rank);
    s.seed = 42;
    s.drop_last = true;
    CHECK(shard_size(s) == 3);
    CHECK(shard_indices(s) == expected[rank]);
  }
}

TEST_CASE("unshuffled ranks take turns from 0 on", "[sampler][pure]") {
  CHECK(in_order(10, 3, 0) == Indices{0, 3, 6, 9});
  CHECK(in_order(10, 3, 1) == Indices{1, 4, 7, 0});
  CHECK(in_order(10, 3, 2) == Indices{2, 5, 8, 1});
}

TEST_CASE("more ranks than samples repeat them as often as it takes", "[sampler][pure]") {
  for (int64_t rank = 0; rank < 8; ++rank) {
    CAPTURE(rank);
    CHECK(in_order(2, 8, rank) == Indices{static_cast<size_t>(rank % 2)});
    CHECK(in_order(2, 8, rank, /*drop_last=*/true).empty());
  }
}

TEST_CASE("an empty dataset gives empty shares", "[sampler][pure]") {
  CHECK(shard_indices(spec(0, 3, 1)).empty());
  CHECK(in_order(0, 3, 1, /*drop_last=*/true).empty());
}

TEST_CASE("the indices are those of Python's DistributedSampler", "[sampler][pure]") {
  std::ifstream recording(DDP_PYTHON_SAMPLER);
  int configurations = 0;
  for (std::string line; std::getline(recording, line);) {
    if (line.empty() || line[0] == '#') continue;
    CAPTURE(line);
    std::istringstream fields(line);
    ddp::ShardSpec s;
    int64_t size = 0;
    uint64_t hash = 0;
    fields >> s.dataset_size >> s.num_replicas >> s.shuffle >> s.seed >> s.epoch >> s.drop_last >>
        size >> std::hex >> hash;
    REQUIRE(fields);

    uint64_t state = 0xCBF29CE484222325;
    for (s.rank = 0; s.rank < s.num_replicas; ++s.rank) {
      for (const size_t index : shard_indices(s)) state = fold(state, index);
    }
    CHECK(shard_size(s) == size);
    CHECK(state == hash);
    ++configurations;
  }
  CHECK(configurations == 400);
}
