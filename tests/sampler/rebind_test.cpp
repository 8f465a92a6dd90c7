// Steps of the same samples for any number of ranks, and ranks that are lost and join.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/length_grouped_sampler.h>
#include <ddp/sampler.h>

#include "drawing.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::DistributedEvalSampler;
using ddp::DistributedEvalSamplerOptions;
using ddp::DistributedSampler;
using ddp::DistributedSamplerOptions;
using namespace ddp::testing;

DistributedSamplerOptions one_of(int64_t rank, int64_t ranks) {
  return DistributedSamplerOptions().num_replicas(ranks).rank(rank).seed(3);
}

Indices sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

using Samplers = std::vector<std::unique_ptr<ddp::ShardedSampler>>;

Samplers make_samplers(const std::string& kind, int64_t ranks, size_t size) {
  Samplers samplers;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (kind == "grouped") {
      std::vector<int64_t> lengths(size);
      for (size_t i = 0; i < size; ++i) lengths[i] = static_cast<int64_t>(i * 37 % 11);
      samplers.push_back(std::make_unique<ddp::DistributedLengthGroupedSampler>(
          lengths, ddp::DistributedLengthGroupedSamplerOptions(2).num_replicas(ranks).rank(rank)));
    } else if (kind == "eval") {
      samplers.push_back(std::make_unique<DistributedEvalSampler>(
          size, DistributedEvalSamplerOptions().num_replicas(ranks).rank(rank)));
    } else {
      samplers.push_back(std::make_unique<DistributedSampler>(
          size, one_of(rank, ranks).drop_last(kind == "drop_last")));
    }
  }
  return samplers;
}

// The samples of the next step, by rank; none when the epoch is over.
std::vector<Indices> next_step(const Samplers& samplers, size_t global) {
  std::vector<Indices> parts;
  size_t ended = 0;
  for (const auto& sampler : samplers) {
    const auto part = sampler->next_of(global);
    ended += part ? 0 : 1;
    if (part) parts.push_back(*part);
  }
  CHECK((ended == 0 || ended == samplers.size()));
  return parts;
}

Indices merged(const std::vector<Indices>& parts) {
  Indices all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return sorted(all);
}

// The samples of each step that is left, sorted.
std::vector<Indices> steps_of(const Samplers& samplers, size_t global, size_t at_most = 1000) {
  std::vector<Indices> steps;
  while (steps.size() < at_most) {
    const auto parts = next_step(samplers, global);
    if (parts.empty()) break;
    steps.push_back(merged(parts));
    for (const auto& part : parts) CHECK(part.size() <= (global + parts.size() - 1) / parts.size());
  }
  return steps;
}

}  // namespace

TEST_CASE("next_of gives the same samples a step for any number of ranks", "[sampler][pure]") {
  const std::string kind = GENERATE("repeat", "drop_last", "eval", "grouped");
  const size_t size = GENERATE(0, 1, 20, 23);
  const size_t global = GENERATE(1, 4, 5, 100);
  CAPTURE(kind, size, global);
  const auto one = steps_of(make_samplers(kind, 1, size), global);
  const size_t whole = size / global;
  CHECK(one.size() == (kind == "drop_last" || size % global == 0 ? whole : whole + 1));
  Indices all = merged(one);
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
  CHECK(all.size() == (kind == "drop_last" ? whole * global : size));
  for (const int64_t ranks : {2, 3, 7}) {
    CAPTURE(ranks);
    CHECK(steps_of(make_samplers(kind, ranks, size), global) == one);
  }
}

TEST_CASE("an epoch of next_of goes on with another number of ranks", "[sampler][pure]") {
  const std::string kind = GENERATE("repeat", "drop_last", "eval", "grouped");
  const int64_t from = GENERATE(2, 3);
  const int64_t to = GENERATE(1, 2, 3, 4);
  CAPTURE(kind, from, to);
  const size_t global = 5;
  const auto whole = steps_of(make_samplers(kind, 1, 23), global);
  const auto before = make_samplers(kind, from, 23);
  auto steps = steps_of(before, global, /*at_most=*/2);
  const auto after = make_samplers(kind, to, 23);
  for (const auto& sampler : after) load(*sampler, saved(*before.back()));
  if (from == to) {
    // Each rank's part, too.
    for (int step = 2; step < 4; ++step) {
      const auto parts = next_step(before, global);
      CHECK(next_step(after, global) == parts);
      steps.push_back(merged(parts));
    }
  }
  const auto rest = steps_of(after, global);
  steps.insert(steps.end(), rest.begin(), rest.end());
  CHECK(steps == whole);
}

TEST_CASE("next_of is refused beside next and consume", "[sampler][errors]") {
  DistributedSampler sampler(20, one_of(1, 2));
  CHECK_THAT(error_of([&] { sampler.next_of(0); }), ContainsText("samples >= 1 and below 2^31"));
  sampler.next_of(4);
  CHECK_THAT(
      error_of([&] { sampler.next(2); }),
      ContainsText("DistributedSampler::next: expected either next() or next_of() within an epoch, "
                   "got both on rank 1"));
  CHECK_THAT(error_of([&] { sampler.consume(1); }), ContainsText("an epoch of next_of()"));
  sampler.set_epoch(1);
  sampler.reset();
  sampler.next(2);
  CHECK_THAT(error_of([&] { sampler.next_of(4); }), ContainsText("next_of: expected either"));
}

TEST_CASE("samplers go on in the midst of an epoch after rebind", "[sampler][ranks]") {
  const bool by_steps = GENERATE(true, false);
  CAPTURE(by_steps);
  // Ranks 0 and 1 of 2; then 2 joins, which was alone before.
  const auto parts = run_ranks<std::vector<Indices>>(3, [&](const Rank& self) {
    const bool joins = self.rank == 2;
    DistributedSampler sampler(30, joins ? one_of(0, 1) : one_of(self.rank, 2));
    const auto take = [&] { return by_steps ? sampler.next_of(6) : sampler.next(3); };
    Indices before;
    for (int i = 0; i < 2 && !joins; ++i) {
      const auto part = *take();
      before.insert(before.end(), part.begin(), part.end());
    }
    const auto position = ddp::all_gather_strings(saved(sampler), self.group).front();
    if (joins) load(sampler, position);
    sampler.rebind(self.group);
    Indices after;
    if (self.rank == 0) sampler.reset();  // as a data loader does that begins again
    while (const auto part = take()) after.insert(after.end(), part->begin(), part->end());
    return std::vector<Indices>{before, after};
  });
  Indices before, after;
  for (const auto& rank : parts) {
    before.insert(before.end(), rank[0].begin(), rank[0].end());
    after.insert(after.end(), rank[1].begin(), rank[1].end());
  }
  const auto order = epoch_of(*make_samplers("repeat", 1, 30)[0]);
  CHECK(sorted(before) == sorted(Indices(order.begin(), order.begin() + 12)));
  CHECK(sorted(after) == sorted(Indices(order.begin() + 12, order.end())));
}

TEST_CASE("an epoch that is over stays so after rebind", "[sampler][ranks]") {
  const std::string kind = GENERATE("repeat", "drop_last", "eval");
  const bool by_steps = GENERATE(true, false);
  CAPTURE(kind, by_steps);
  const auto counts = run_ranks<std::vector<size_t>>(2, [&](const Rank& self) {
    const bool is_eval = kind == "eval";
    DistributedSampler trains(
        11, one_of(self.rank, 2).drop_last(kind == "drop_last").advance_epoch(true));
    DistributedEvalSampler evaluates(11, one_of(self.rank, 2).advance_epoch(true));
    ddp::ShardedSampler& sampler = is_eval ? static_cast<ddp::ShardedSampler&>(evaluates) : trains;
    const auto take = [&] { return by_steps ? sampler.next_of(2) : sampler.next(1); };
    const auto count = [&] {
      size_t samples = 0;
      while (const auto part = take()) samples += part->size();
      return samples;
    };
    count();
    sampler.rebind(self.group);
    const size_t rest = count();
    sampler.reset();
    return std::vector<size_t>{rest, sampler.epoch(), count()};
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    const bool is_whole = kind == "repeat" && !by_steps;
    const size_t own = kind == "drop_last" ? 5 : rank == 0 || is_whole ? 6 : 5;
    CHECK(counts[rank] == std::vector<size_t>{0, 1, own});
  }
}

TEST_CASE("rebind finds ranks that used unequally many samples", "[sampler][ranks][errors]") {
  const std::string kind = GENERATE("used", "not loaded", "seed", "epoch", "uneven end");
  CAPTURE(kind);
  const auto errors = errors_of_ranks(3, [&](const Rank& self) {
    DistributedSampler sampler(40, one_of(self.rank, 3).seed(kind == "seed" ? self.rank : 0));
    const bool is_other = self.rank == 1;
    if (kind == "epoch" && is_other) sampler.set_epoch(4);
    if (kind == "used") sampler.next(is_other ? 2 : 3);
    if (kind == "not loaded" && !is_other) sampler.next_of(6);
    DistributedEvalSampler uneven(10, one_of(self.rank, 3));  // 4, 3 and 3
    while (kind == "uneven end" && uneven.next(1)) {
    }
    sampler.rebind(self.group);
    uneven.rebind(self.group);
  });
  const auto text = [&]() -> std::string {
    if (kind == "seed") return "got seed=0 on rank 0 and seed=1 on rank 1 of 3";
    if (kind == "epoch") return "got epoch 0, position 0 on rank 0 of 3, and epoch 4, position 0";
    if (kind == "used") return "got epoch 0, position 6 on rank 1 of 3, and epoch 0, position 9";
    return "got epoch 0, position 0 on rank 1 of 3, and epoch 0, position 6 on another. Let all";
  }();
  for (const auto& error : errors) {
    if (kind == "uneven end") {
      CHECK(error == "");
    } else {
      CHECK_THAT(error, ContainsText("DistributedSampler::rebind: expected"));
      CHECK_THAT(error, ContainsText(text));
    }
  }
}

TEST_CASE("a rank may join before the first step of an epoch", "[sampler][ranks]") {
  const auto taken = run_ranks<std::vector<size_t>>(3, [](const Rank& self) {
    const bool joins = self.rank == 1;  // from a world of its own
    DistributedSampler sampler(12, joins ? one_of(0, 1) : one_of(self.rank, 3));
    sampler.rebind(self.group);
    return rest(sampler);
  });
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler alike(12, one_of(rank, 3));
    CHECK(taken[rank] == epoch_of(alike));
  }
}

TEST_CASE("a sampler goes back to a bookmark", "[sampler][rebind]") {
  DistributedSampler sampler(20, one_of(1, 3));
  sampler.set_epoch(2);
  sampler.reset();
  sampler.next(2);
  const auto before = sampler.bookmark();
  CHECK(!sampler.is_over());
  const auto expected = rest(sampler);
  CHECK(expected.size() == 5);
  CHECK(sampler.is_over());
  const auto at_end = sampler.bookmark();
  sampler.set_epoch(3);
  before();
  CHECK(sampler.epoch() == 2);
  CHECK(epoch_of(sampler) == expected);
  before();
  sampler.stop();  // of a loader that draws ahead
  CHECK(sampler.is_over());
  CHECK(rest(sampler).empty());
  before();
  CHECK(epoch_of(sampler) == expected);
  at_end();
  CHECK(sampler.is_over());
  CHECK(rest(sampler).empty());
}
