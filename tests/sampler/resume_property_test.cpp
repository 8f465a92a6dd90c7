// Random runs that stop in the middle of an epoch and continue, on other numbers of ranks: no
// sample may be lost or repeated, except those that even out the end of the epoch.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ddp/length_grouped_sampler.h>
#include <ddp/sampler.h>
#include <ddp/weighted_sampler.h>

#include "drawing.h"
#include "support/catch.h"

namespace {

enum class Kind { kRepeat, kDrop, kEval, kWeighted, kGrouped };

/// One random run: a sampler, and how many ranks visit how many steps of the epoch in each part.
struct Run {
  Kind kind = Kind::kRepeat;
  int64_t size = 0;
  int64_t seed = 0;
  size_t epoch = 0;
  size_t batch_size = 1;
  /// Batches that are drawn ahead of the loop, and lost with each stop; none: consume is not
  /// called.
  size_t ahead = 0;
  struct Part {
    int64_t num_replicas = 1;
    int64_t steps = 0;
  };
  std::vector<Part> parts;
};

Run random_run(std::mt19937& random) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  Run run;
  run.kind = static_cast<Kind>(draw(0, 4));
  run.size = draw(run.kind == Kind::kWeighted ? 1 : 0, 60);
  run.seed = draw(0, 1000);
  run.epoch = static_cast<size_t>(draw(0, 3));
  run.batch_size = static_cast<size_t>(draw(1, 4));
  run.ahead = static_cast<size_t>(draw(0, 3));
  for (int64_t i = draw(0, 3); i >= 0; --i) run.parts.push_back({draw(1, 5), draw(0, 4)});
  return run;
}

std::unique_ptr<ddp::ShardedSampler> make_sampler(const Run& run, int64_t rank, int64_t replicas) {
  const auto size = static_cast<size_t>(run.size);
  const auto batch_size = static_cast<int64_t>(run.batch_size);
  switch (run.kind) {
    case Kind::kEval:
      return std::make_unique<ddp::DistributedEvalSampler>(
          size,
          ddp::DistributedEvalSamplerOptions().rank(rank).num_replicas(replicas).shuffle(true).seed(
              run.seed));
    case Kind::kWeighted: {
      std::vector<double> weights(size);
      for (size_t i = 0; i < size; ++i) weights[i] = 1.0 + static_cast<double>(i % 3);
      return std::make_unique<ddp::DistributedWeightedSampler>(
          weights, ddp::DistributedWeightedSamplerOptions().rank(rank).num_replicas(replicas).seed(
                       run.seed));
    }
    case Kind::kGrouped: {
      std::vector<int64_t> lengths(size);
      for (size_t i = 0; i < size; ++i) lengths[i] = static_cast<int64_t>(i * 37 % 11);
      return std::make_unique<ddp::DistributedLengthGroupedSampler>(
          lengths, ddp::DistributedLengthGroupedSamplerOptions(batch_size)
                       .rank(rank)
                       .num_replicas(replicas)
                       .batches_per_bucket(2)
                       .seed(run.seed));
    }
    default:
      return std::make_unique<ddp::DistributedSampler>(
          size, ddp::DistributedSamplerOptions()
                    .rank(rank)
                    .num_replicas(replicas)
                    .seed(run.seed)
                    .drop_last(run.kind == Kind::kDrop));
  }
}

/// The ranks that visit the samples of one part, in turns.
class Ranks {
 public:
  Ranks(const Run& run, int64_t num_replicas, const std::string& archive) : run_(run) {
    for (int64_t rank = 0; rank < num_replicas; ++rank) {
      samplers_.push_back(make_sampler(run, rank, num_replicas));
      if (archive.empty()) {
        samplers_.back()->set_epoch(run.epoch);
      } else {
        load(*samplers_.back(), archive);
      }
      samplers_.back()->reset();
    }
  }

  Indices steps(int64_t count) {
    std::vector<Indices> shares;
    for (auto& sampler : samplers_) shares.push_back(steps_of(*sampler, count));
    return in_turns(shares);
  }

  Indices rest_of_epoch() { return steps(run_.size + 1); }

  /// Returns rank 0's state, which every rank's must equal (an evaluation's ranks have unequal
  /// shares).
  std::string save() const {
    const std::string first = saved(*samplers_.front());
    for (const auto& sampler : samplers_) {
      if (run_.kind != Kind::kEval) CHECK(saved(*sampler) == first);
    }
    return first;
  }

 private:
  Indices steps_of(ddp::ShardedSampler& sampler, int64_t count) const {
    Indices visited;
    if (run_.ahead > 0) sampler.consume(0);
    for (int64_t step = 0; step < count; ++step) {
      const auto batch = sampler.next(run_.batch_size);
      if (!batch) break;
      visited.insert(visited.end(), batch->begin(), batch->end());
    }
    if (run_.ahead > 0) {
      for (size_t i = 0; i < run_.ahead; ++i) sampler.next(run_.batch_size);
      sampler.consume(visited.size());
    }
    return visited;
  }

  static Indices in_turns(const std::vector<Indices>& shares) {
    Indices all;
    for (size_t i = 0; i < shares[0].size(); ++i) {
      for (const auto& share : shares) {
        if (i < share.size()) all.push_back(share[i]);
      }
    }
    return all;
  }

  const Run& run_;
  std::vector<std::unique_ptr<ddp::ShardedSampler>> samplers_;
};

/// Checks that `visited` is `order`, except for samples that an epoch's end may repeat or drop.
///
/// \param replicas  the number of ranks that reached the end.
void check_visited(const Run& run, size_t replicas, const Indices& visited, const Indices& order) {
  const size_t common = std::min(visited.size(), order.size());
  CHECK(
      Indices(visited.begin(), visited.begin() + common) ==
      Indices(order.begin(), order.begin() + common));
  if (run.kind == Kind::kDrop) {
    CHECK(visited.size() <= order.size());
    CHECK(order.size() - visited.size() < replicas);
  } else if (run.kind == Kind::kEval) {
    CHECK(visited.size() == order.size());
  } else {
    CHECK(visited.size() >= order.size());
    CHECK(visited.size() - order.size() < replicas);
    for (size_t i = order.size(); i < visited.size(); ++i) {
      CHECK(visited[i] == order[(i - order.size()) % order.size()]);
    }
  }
}

}  // namespace

TEST_CASE(
    "an epoch that resumes on other numbers of ranks visits the same order", "[sampler][pure]") {
  std::mt19937 random(20260);
  std::map<Kind, int> runs_of_kind;
  int resumed = 0;
  for (int i = 0; i < 500; ++i) {
    const Run run = random_run(random);
    CAPTURE(
        i, static_cast<int>(run.kind), run.size, run.seed, run.epoch, run.batch_size, run.ahead);
    ++runs_of_kind[run.kind];

    // The order depends on the first part's ranks: length groups depend on their number.
    const Indices order = [&] {
      auto first = run;
      if (first.kind != Kind::kGrouped) first.parts[0].num_replicas = 1;
      auto whole = Ranks(first, first.parts[0].num_replicas, "").rest_of_epoch();
      whole.resize(std::min<size_t>(whole.size(), static_cast<size_t>(run.size)));
      return whole;
    }();

    Indices visited;
    std::string archive;
    int64_t replicas = 0;
    for (const auto& part : run.parts) {
      replicas = part.num_replicas;
      CAPTURE(replicas, part.steps);
      Ranks ranks(run, replicas, archive);
      const bool last = &part == &run.parts.back();
      const auto indices = last ? ranks.rest_of_epoch() : ranks.steps(part.steps);
      visited.insert(visited.end(), indices.begin(), indices.end());
      archive = ranks.save();
      if (visited.size() >= order.size()) break;
      if (!last && !visited.empty()) ++resumed;
    }
    check_visited(run, static_cast<size_t>(replicas), visited, order);
  }
  for (const auto& [kind, runs] : runs_of_kind) CHECK(runs >= 60);
  CHECK(runs_of_kind.size() == 5);
  CHECK(resumed >= 200);
}
