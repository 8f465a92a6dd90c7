// The random numbers of layers that are cut, and of a group.
#include <mutex>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/ranks.h"

#include "support/catch.h"

using Catch::Matchers::Contains;
using namespace ddp::testing;
using torch::Tensor;

TEST_CASE("layers draw what the whole ones draw", "[parallel][tensor][ranks]") {
  // One rank: the others would draw from the same generator.
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    const auto drawn_alike = [](const auto& make_cut, const auto& make_whole) {
      torch::manual_seed(7);
      const auto cut = make_cut();
      const auto next = torch::rand({3});
      torch::manual_seed(7);
      const auto whole = make_whole();
      return cut.equal(whole) && next.equal(torch::rand({3}));
    };
    namespace nn = torch::nn;
    const auto& g = self.group;
    if (!drawn_alike(
            [&] {
              return ddp::ColumnParallelLinear(
                         ddp::ColumnParallelLinearOptions(4, 6).process_group(g))
                  ->bias;
            },
            [] { return nn::Linear(4, 6)->bias; })) {
      return "column";
    }
    if (!drawn_alike(
            [&] {
              return ddp::RowParallelLinear(ddp::RowParallelLinearOptions(4, 6).process_group(g))
                  ->weight;
            },
            [] { return nn::Linear(4, 6)->weight; })) {
      return "row";
    }
    if (!drawn_alike(
            [&] {
              return ddp::VocabParallelEmbedding(
                         ddp::VocabParallelEmbeddingOptions(5, 6).process_group(g))
                  ->weight;
            },
            [] { return nn::Embedding(5, 6)->weight; })) {
      return "embedding";
    }
    if (!drawn_alike(
            [&] {
              return ddp::ParallelMultiheadAttention(
                         ddp::ParallelMultiheadAttentionOptions(4, 2).process_group(g))
                  ->in_proj->weight;
            },
            [] { return nn::MultiheadAttention(4, 2)->in_proj_weight; })) {
      return "attention";
    }
    return "";
  });
  CHECK(faults[0].empty());
}

TEST_CASE("a group's own random numbers leave the others alone", "[parallel][tensor][ranks]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    torch::manual_seed(3);
    const auto first = torch::rand({4}), second = torch::rand({4});
    torch::manual_seed(3);
    if (!torch::rand({4}).equal(first)) return "seed";
    Tensor own;
    {
      const ddp::TensorParallelRng guard(self.group);
      own = torch::rand({4});
      const ddp::TensorParallelRng inner(self.group);  // does nothing
      if (torch::rand({4}).equal(own)) return "the guard draws the same again";
    }
    if (own.equal(first) || own.equal(second)) return "the guard draws the shared numbers";
    if (!torch::rand({4}).equal(second)) return "the shared numbers changed";
    const ddp::TensorParallelRng guard(self.group);
    return torch::rand({4}).equal(own) ? "the group's numbers begin again" : "";
  });
  CHECK(faults[0].empty());
}

TEST_CASE("each rank of a group has its own random numbers", "[parallel][tensor][ranks]") {
  std::mutex one_at_a_time;  // for ranks share the default generator
  const auto drawn = run_ranks<std::vector<Tensor>>(3, [&](const Rank& self) {
    const std::lock_guard lock(one_at_a_time);
    torch::manual_seed(3);
    Tensor own;
    {
      const ddp::TensorParallelRng guard(self.group);
      own = torch::rand({4});
    }
    return std::vector<Tensor>{own, torch::rand({4})};
  });
  for (size_t rank = 1; rank < drawn.size(); ++rank) {
    CHECK_FALSE(drawn[rank][0].equal(drawn[rank - 1][0]));
    CHECK(drawn[rank][1].equal(drawn[0][1]));
  }
}

TEST_CASE("replicas whose seeds differ by one draw other numbers", "[parallel][tensor][ranks]") {
  std::mutex one_at_a_time;  // for ranks share the default generator
  const auto by_replica = [&](uint64_t seed) {
    return run_ranks<Tensor>(4, [&](const Rank& self) {
      const std::lock_guard lock(one_at_a_time);
      torch::manual_seed(seed);
      const ddp::TensorParallelRng guard(self.group);
      return torch::rand({4});
    });
  };
  std::vector<Tensor> all;
  for (const uint64_t seed : {3, 4, 5}) {
    for (const auto& drawn : by_replica(seed)) {
      for (const auto& other : all) CHECK_FALSE(drawn.equal(other));
      all.push_back(drawn);
    }
  }
  for (size_t rank = 0; rank < 4; ++rank) CHECK(by_replica(4)[rank].equal(all[4 + rank]));
}

TEST_CASE("a group's numbers are seeded again", "[parallel][tensor][ranks]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    const auto drawn = [&] {
      const ddp::TensorParallelRng guard(self.group);
      return torch::rand({4});
    };
    torch::manual_seed(3);
    const auto of_three = drawn();
    torch::manual_seed(3);
    if (drawn().equal(of_three)) return "torch::manual_seed() is said to change nothing";
    ddp::TensorParallelRng::manual_seed(3, self.group);
    if (!drawn().equal(of_three)) return "not as with the seed 3";
    ddp::TensorParallelRng::manual_seed(4, self.group);
    return drawn().equal(of_three) ? "4 is as 3" : "";
  });
  CHECK(faults[0].empty());
  const auto errors = errors_of_ranks(1, [](const Rank& self) {
    const ddp::TensorParallelRng guard(self.group);
    ddp::TensorParallelRng::manual_seed(3, self.group);
  });
  CHECK_THAT(errors[0], Contains("expected no guard around it"));
}

TEST_CASE("recomputation repeats a group's own random numbers", "[parallel][tensor][ranks]") {
  const auto faults = run_ranks<std::string>(1, [](const Rank& self) -> std::string {
    std::vector<Tensor> drawn;
    const auto forward = [&](const Tensor& x) {
      const ddp::TensorParallelRng guard(self.group);
      drawn.push_back(torch::rand({4}));
      return x * drawn.back();
    };
    for (int time = 0; time < 2; ++time) {  // the first time makes the group's numbers
      drawn.clear();
      const auto x = torch::ones({4}).requires_grad_();
      ddp::checkpoint(ddp::CheckpointOptions(), forward, x).sum().backward();
      if (drawn.size() != 2 || !drawn[0].equal(drawn[1])) return "time " + std::to_string(time);
    }
    return "";
  });
  CHECK(faults[0].empty());
}

TEST_CASE("ranks that draw different layers get an error", "[parallel][tensor][ranks][errors]") {
  // Two threads draw from one generator, so the values differ.
  const auto errors = errors_of_ranks(2, [](const Rank& self) {
    ddp::ColumnParallelLinear(ddp::ColumnParallelLinearOptions(64, 64).process_group(self.group));
  });
  CHECK_THAT(
      errors,
      Each(Contains("ColumnParallelLinear: expected the same random numbers on all ranks")));
}
