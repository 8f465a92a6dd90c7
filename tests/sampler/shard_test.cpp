#include "sampler/order.h"

#include <fstream>
#include <ios>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.h"

namespace {

using Indices = std::vector<size_t>;

/// One DistributedSampler epoch, without the sampler.
struct Epoch {
  ddp::ShardSpec shard;
  bool shuffle = true;
  int64_t seed = 0;
};

Epoch epoch_of(int64_t dataset_size, int64_t num_replicas, int64_t rank) {
  Epoch result;
  result.shard.order_size = dataset_size;
  result.shard.num_replicas = num_replicas;
  result.shard.rank = rank;
  return result;
}

Indices drawn(const Epoch& epoch) {
  const auto order = ddp::permuted_order(epoch.shard.order_size, epoch.shuffle);
  return take_shard(
      order.draw(order.size, static_cast<uint64_t>(epoch.seed), /*step_size=*/1), epoch.shard);
}

Indices shuffled(int64_t size, int64_t replicas, int64_t rank, int64_t seed) {
  auto epoch = epoch_of(size, replicas, rank);
  epoch.seed = seed;
  return drawn(epoch);
}

Indices in_order(
    int64_t size, int64_t replicas, int64_t rank, ddp::Tail tail = ddp::Tail::kRepeat) {
  auto epoch = epoch_of(size, replicas, rank);
  epoch.shuffle = false;
  epoch.shard.tail = tail;
  return drawn(epoch);
}

Indices head(const Indices& indices, size_t count) {
  return Indices(indices.begin(), indices.begin() + static_cast<std::ptrdiff_t>(count));
}

// One step of FNV-1a over 64-bit words: as in record_python_sampler.py.
uint64_t fold(uint64_t state, uint64_t value) { return (state ^ value) * 0x100000001B3; }

}  // namespace

TEST_CASE("one rank visits torch's permutation", "[sampler][pure]") {
  CHECK(shuffled(10, 1, 0, 0) == Indices{4, 1, 7, 5, 3, 9, 0, 8, 6, 2});
  CHECK(shuffled(10, 1, 0, 1) == Indices{5, 6, 1, 2, 0, 8, 9, 3, 7, 4});
}

TEST_CASE("torch changes its permutation's algorithm with the size", "[sampler][pure]") {
  CHECK(head(shuffled(20000, 1, 0, 0), 4) == Indices{16044, 15558, 2137, 17756});
  CHECK(head(shuffled(40000, 1, 0, 0), 4) == Indices{16044, 31897, 28527, 5740});
}

TEST_CASE(
    "ranks take turns in the shuffled order, which repeats its front to come out even",
    "[sampler][pure]") {
  CHECK(shuffled(10, 3, 0, 0) == Indices{4, 5, 0, 2});
  CHECK(shuffled(10, 3, 1, 0) == Indices{1, 3, 8, 4});
  CHECK(shuffled(10, 3, 2, 0) == Indices{7, 9, 6, 1});
  CHECK(shuffled(10, 3, 0, 1) == Indices{5, 2, 9, 4});
  CHECK(shuffled(10, 3, 0, 2) == Indices{8, 5, 0, 3});
}

TEST_CASE("drop_last drops the tail of the shuffled order", "[sampler][pure]") {
  const Indices expected[] = {{2, 8, 0}, {6, 4, 9}, {1, 5, 3}};
  for (int64_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    auto epoch = epoch_of(10, 3, rank);
    epoch.seed = 42;
    epoch.shard.tail = ddp::Tail::kDrop;
    CHECK(sample_count(epoch.shard) == 3);
    CHECK(drawn(epoch) == expected[rank]);
  }
}

TEST_CASE("unshuffled ranks take turns from 0 on", "[sampler][pure]") {
  CHECK(in_order(10, 3, 0) == Indices{0, 3, 6, 9});
  CHECK(in_order(10, 3, 1) == Indices{1, 4, 7, 0});
  CHECK(in_order(10, 3, 2) == Indices{2, 5, 8, 1});
}

TEST_CASE("with more ranks than samples, samples repeat as often as needed", "[sampler][pure]") {
  for (int64_t rank = 0; rank < 8; ++rank) {
    CAPTURE(rank);
    CHECK(in_order(2, 8, rank) == Indices{static_cast<size_t>(rank % 2)});
    CHECK(in_order(2, 8, rank, ddp::Tail::kDrop).empty());
  }
}

TEST_CASE("an empty dataset gives empty shares", "[sampler][pure]") {
  CHECK(drawn(epoch_of(0, 3, 1)).empty());
  CHECK(in_order(0, 3, 1, ddp::Tail::kDrop).empty());
}

TEST_CASE("the indices are those of Python's DistributedSampler", "[sampler][pure]") {
  std::ifstream recording(DDP_PYTHON_SAMPLER);
  int configurations = 0;
  for (std::string line; std::getline(recording, line);) {
    if (line.empty() || line[0] == '#') continue;
    CAPTURE(line);
    std::istringstream fields(line);
    Epoch epoch;
    int64_t number = 0;
    bool drop_last = false;
    int64_t size = 0;
    uint64_t hash = 0;
    fields >> epoch.shard.order_size >> epoch.shard.num_replicas >> epoch.shuffle >> epoch.seed >>
        number >> drop_last >> size >> std::hex >> hash;
    REQUIRE(fields);
    epoch.seed =
        static_cast<int64_t>(static_cast<uint64_t>(epoch.seed) + static_cast<uint64_t>(number));
    if (drop_last) epoch.shard.tail = ddp::Tail::kDrop;

    uint64_t state = 0xCBF29CE484222325;
    for (int64_t rank = 0; rank < epoch.shard.num_replicas; ++rank) {
      epoch.shard.rank = rank;
      for (const size_t index : drawn(epoch)) state = fold(state, index);
    }
    CHECK(sample_count(epoch.shard) == size);
    CHECK(state == hash);
    ++configurations;
  }
  CHECK(configurations == 400);
}

TEST_CASE("an uneven shard gives every sample to one rank", "[sampler][pure]") {
  using ddp::Tail;
  CHECK(in_order(10, 3, 0, Tail::kUneven) == Indices{0, 3, 6, 9});
  CHECK(in_order(10, 3, 1, Tail::kUneven) == Indices{1, 4, 7});
  CHECK(in_order(10, 3, 2, Tail::kUneven) == Indices{2, 5, 8});
  CHECK(in_order(2, 3, 2, Tail::kUneven).empty());
}

TEST_CASE("a shard with batches keeps those that are full on every rank", "[sampler][pure]") {
  auto epoch = epoch_of(17, 2, 1);
  epoch.shuffle = false;
  epoch.shard.tail = ddp::Tail::kDrop;
  epoch.shard.batch_size = 4;
  CHECK(drawn(epoch) == Indices{1, 3, 5, 7, 9, 11, 13, 15});
  epoch.shard.order_size = 15;
  CHECK(drawn(epoch) == Indices{1, 3, 5, 7});
}

TEST_CASE("a shard with an offset deals out the rest of the order", "[sampler][pure]") {
  auto epoch = epoch_of(10, 3, 2);
  epoch.shuffle = false;
  epoch.shard.offset = 4;
  CHECK(drawn(epoch) == Indices{6, 9});
  epoch.shard.offset = 5;
  CHECK(drawn(epoch) == Indices{7, 0});  // 5..9, and 0 from the front evens it out
  epoch.shard.tail = ddp::Tail::kUneven;
  CHECK(drawn(epoch) == Indices{7});
  epoch.shard.tail = ddp::Tail::kDrop;
  CHECK(drawn(epoch) == Indices{7});
  epoch.shard.offset = 12;
  CHECK(drawn(epoch).empty());
}
