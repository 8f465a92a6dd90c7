// The samplers other than DistributedSampler: which samples they give, and which options they
// refuse.
#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include <ddp/length_grouped_sampler.h>
#include <ddp/sampler.h>
#include <ddp/weighted_sampler.h>

#include "drawing.h"
#include "support/catch.h"

namespace {

using ddp::DistributedEvalSampler;
using ddp::DistributedEvalSamplerOptions;
using ddp::DistributedLengthGroupedSampler;
using ddp::DistributedLengthGroupedSamplerOptions;
using ddp::DistributedWeightedSampler;
using ddp::DistributedWeightedSamplerOptions;

DistributedEvalSampler eval_of(size_t size, int64_t rank, int64_t num_replicas, bool shuffle) {
  return DistributedEvalSampler(
      size, DistributedEvalSamplerOptions().rank(rank).num_replicas(num_replicas).shuffle(shuffle));
}

DistributedWeightedSamplerOptions weighted(int64_t rank = 0, int64_t num_replicas = 1) {
  return DistributedWeightedSamplerOptions().rank(rank).num_replicas(num_replicas);
}

DistributedLengthGroupedSamplerOptions grouped(
    int64_t batch_size, int64_t rank = 0, int64_t num_replicas = 1) {
  return DistributedLengthGroupedSamplerOptions(batch_size).rank(rank).num_replicas(num_replicas);
}

const std::vector<double> kWeights = {0.1, 0.0, 3.0, 1.5, 0.4, 2.0, 0.0, 1.0};

std::vector<int64_t> random_lengths(size_t size) {
  std::vector<int64_t> lengths(size);
  for (size_t i = 0; i < size; ++i) lengths[i] = static_cast<int64_t>(i * 7919 % 1009);
  return lengths;
}

}  // namespace

TEST_CASE("DistributedEvalSampler gives each sample to exactly one rank", "[sampler][pure]") {
  const bool shuffle = GENERATE(false, true);
  for (const size_t size : {0, 1, 2, 7, 12, 101}) {
    for (const int64_t num_replicas : {1, 2, 3, 8}) {
      CAPTURE(shuffle, size, num_replicas);
      std::vector<int> times(size);
      for (int64_t rank = 0; rank < num_replicas; ++rank) {
        auto sampler = eval_of(size, rank, num_replicas, shuffle);
        const auto indices = epoch_of(sampler);
        CHECK(indices.size() == sampler.size());
        for (const size_t index : indices) ++times.at(index);
      }
      CHECK(times == std::vector<int>(size, 1));
    }
  }
}

TEST_CASE("DistributedEvalSampler takes DistributedSampler's options", "[sampler][errors]") {
  const auto options = ddp::DistributedSamplerOptions().rank(0).num_replicas(3);
  DistributedEvalSampler sampler(10, options);
  CHECK(epoch_of(sampler) == Indices{4, 5, 0, 2});
  DistributedEvalSampler last(10, ddp::DistributedSamplerOptions(options).rank(2));
  CHECK(epoch_of(last) == Indices{7, 9, 6});
  CHECK_THAT(
      error_of<c10::Error>([&] {
        DistributedEvalSampler(10, ddp::DistributedSamplerOptions(options).drop_last(true));
      }),
      ContainsText("expected drop_last=false"));
}

TEST_CASE("DistributedEvalSampler keeps the order unless shuffle is set", "[sampler][pure]") {
  auto in_order = eval_of(5, 1, 2, false);
  CHECK(epoch_of(in_order) == Indices{1, 3});
  auto shuffled = eval_of(10, 0, 3, true);
  CHECK(epoch_of(shuffled) == Indices{4, 5, 0, 2});
  shuffled.set_epoch(1);
  CHECK(epoch_of(shuffled) == Indices{5, 2, 9, 4});
}

TEST_CASE("DistributedWeightedSampler draws as WeightedRandomSampler", "[sampler][pure]") {
  // list(WeightedRandomSampler(weights, 10, generator=torch.Generator().manual_seed(seed))), 2.11
  const auto draws = [](int64_t seed, size_t epoch) {
    DistributedWeightedSampler sampler(kWeights, weighted().num_samples(10).seed(seed));
    sampler.set_epoch(epoch);
    CHECK(sampler.size() == 10);
    return epoch_of(sampler);
  };
  CHECK(draws(0, 0) == Indices{7, 5, 3, 7, 5, 5, 2, 2, 4, 2});
  CHECK(draws(1, 0) == Indices{2, 2, 2, 2, 3, 2, 3, 5, 4, 3});
  CHECK(draws(0, 1) == draws(1, 0));
  CHECK(draws(2, 3) == Indices{5, 2, 2, 2, 2, 5, 4, 5, 5, 3});

  // The same with replacement=False and 5 draws.
  DistributedWeightedSampler once(kWeights, weighted().num_samples(5).replacement(false).seed(4));
  CHECK(epoch_of(once) == Indices{2, 5, 7, 3, 0});
}

TEST_CASE("ranks share the weighted draws", "[sampler][pure]") {
  const auto of_rank = [](int64_t rank, bool drop_last) {
    DistributedWeightedSampler sampler(
        kWeights, weighted(rank, 3).num_samples(10).drop_last(drop_last));
    return epoch_of(sampler);
  };
  CHECK(of_rank(0, false) == Indices{7, 7, 2, 2});
  CHECK(of_rank(1, false) == Indices{5, 5, 2, 7});  // evened out with the front
  CHECK(of_rank(2, false) == Indices{3, 5, 4, 5});
  CHECK(of_rank(1, true) == Indices{5, 5, 2});
}

TEST_CASE("a weighted sampler's position is only valid for its weights", "[sampler][errors]") {
  DistributedWeightedSampler saver(kWeights, weighted());
  saver.reset();
  saver.next(2);
  auto other_weights = kWeights;
  other_weights[4] = 0.5;
  DistributedWeightedSampler other(other_weights, weighted());
  CHECK_THAT(
      error_of<c10::Error>([&] { load(other, saved(saver)); }),
      ContainsText("DistributedWeightedSampler::load: expected fingerprint="));
  DistributedLengthGroupedSampler lengths(random_lengths(30), grouped(2));
  auto longer = random_lengths(30);
  longer[7] += 1;
  DistributedLengthGroupedSampler others(longer, grouped(2));
  CHECK_THAT(
      error_of<c10::Error>([&] { load(others, saved(lengths)); }), ContainsText("fingerprint="));
  DistributedWeightedSampler without(kWeights, weighted().num_samples(8).replacement(true));
  load(without, saved(saver));
  CHECK(epoch_of(without) == rest(saver));
}

TEST_CASE("invalid weights are refused", "[sampler][errors]") {
  const auto refused = [](const std::vector<double>& weights,
                          const DistributedWeightedSamplerOptions& options) {
    CHECK_THROWS_AS(DistributedWeightedSampler(weights, options), c10::ValueError);
    return error_of<c10::Error>([&] { DistributedWeightedSampler(weights, options); });
  };
  const std::string name = "DistributedWeightedSampler: ";
  CHECK(
      refused({}, weighted()) == name + "expected 1 to 2^24 weights, one for each sample, got 0.");
  CHECK(
      refused({1, -0.5}, weighted()) ==
      name + "expected weights that are finite and >= 0, got -0.5 for sample 1.");
  CHECK_THAT(refused({NAN}, weighted()), ContainsText("got nan for sample 0"));
  CHECK_THAT(refused({1, INFINITY}, weighted()), ContainsText("got inf for sample 1"));
  CHECK_THAT(refused({0, 0}, weighted()), ContainsText("expected a weight above 0"));
  CHECK_THAT(
      refused({1}, weighted().num_samples(0)), ContainsText("expected num_samples >= 1, got 0"));
  CHECK(
      refused({1, 0, 1}, weighted().replacement(false)) ==
      name +
          "expected num_samples of at most 2, the number of weights above 0, because "
          "replacement is off; got 3. Set num_samples() or replacement(true).");
  CHECK_THAT(refused({1}, weighted(1, 1)), ContainsText(name + "Invalid rank 1"));

  DistributedWeightedSampler sampler(kWeights, weighted().num_samples(20));
  sampler.reset(8);
  CHECK(
      error_of<c10::Error>([&] { sampler.reset(9); }) ==
      "DistributedWeightedSampler::reset: expected a dataset of the 8 samples that the sampler was "
      "constructed for, got 9. Construct another for a dataset of another size.");
}

TEST_CASE("length groups: each sample once, in steps of similar lengths", "[sampler][pure]") {
  const bool shuffle = GENERATE(true, false);
  constexpr size_t kSize = 1003;
  constexpr int64_t kReplicas = 2;
  constexpr size_t kBatch = 8;
  const auto lengths = random_lengths(kSize);
  std::vector<Indices> shares;
  for (int64_t rank = 0; rank < kReplicas; ++rank) {
    DistributedLengthGroupedSampler sampler(
        lengths, grouped(kBatch, rank, kReplicas).batches_per_bucket(20).shuffle(shuffle));
    shares.push_back(epoch_of(sampler, kBatch));
    CHECK(shares.back().size() == 502);
  }

  std::multiset<size_t> seen;
  for (const auto& share : shares) seen.insert(share.begin(), share.end());
  CHECK(std::set<size_t>(seen.begin(), seen.end()).size() == kSize);
  CHECK(seen.size() == kSize + 1);

  // A bucket of 320 of 1009 lengths: the 16 samples of a step span about 1009 / 20.
  int64_t spans = 0;
  std::vector<int64_t> shortest_of_step;
  const size_t full_steps = kSize / (kBatch * kReplicas);
  for (size_t step = 0; step < full_steps; ++step) {
    int64_t shortest = 1009;
    int64_t longest = 0;
    for (const auto& share : shares) {
      for (size_t i = step * kBatch; i < (step + 1) * kBatch; ++i) {
        shortest = std::min(shortest, lengths[share[i]]);
        longest = std::max(longest, lengths[share[i]]);
      }
    }
    spans += longest - shortest;
    shortest_of_step.push_back(shortest);
  }
  const auto mean_span = spans / static_cast<int64_t>(full_steps);
  CAPTURE(mean_span);
  // Within a bucket, steps rise in length, unless they are shuffled.
  const auto first = shortest_of_step.begin();
  CHECK(std::is_sorted(first, first + 20) == !shuffle);
  CHECK(mean_span > 20);
  CHECK(mean_span < 80);
}

TEST_CASE("length groups differ from epoch to epoch and not from rank to rank", "[sampler][pure]") {
  const auto lengths = random_lengths(100);
  DistributedLengthGroupedSampler sampler(lengths, grouped(4).batches_per_bucket(5).seed(3));
  DistributedLengthGroupedSampler same(lengths, grouped(4).batches_per_bucket(5).seed(2));
  const auto first = epoch_of(sampler, 4);
  sampler.set_epoch(1);
  CHECK(epoch_of(sampler, 4) != first);
  same.set_epoch(1);
  CHECK(epoch_of(same, 4) == first);
}

TEST_CASE("length groups of one bucket, unshuffled, are the sorted samples", "[sampler][pure]") {
  DistributedLengthGroupedSampler sampler(
      {5, 1, 4, 1, 3}, grouped(2).shuffle(false).batches_per_bucket(INT64_MAX));
  CHECK(epoch_of(sampler, 2) == Indices{1, 3, 4, 2, 0});
}

TEST_CASE("length groups drop the step that is not full", "[sampler][pure]") {
  DistributedLengthGroupedSampler sampler(random_lengths(21), grouped(4, 1, 2).drop_last(true));
  CHECK(sampler.size() == 8);
  CHECK(epoch_of(sampler, 4).size() == 8);
}

TEST_CASE("invalid options of length groups are refused", "[sampler][errors]") {
  const auto refused = [](const DistributedLengthGroupedSamplerOptions& options) {
    CHECK_THROWS_AS(DistributedLengthGroupedSampler({1, 2}, options), c10::ValueError);
    return error_of<c10::Error>([&] { DistributedLengthGroupedSampler({1, 2}, options); });
  };
  CHECK(
      refused(grouped(0)) ==
      "DistributedLengthGroupedSampler: expected batch_size >= 1 and below 2^31, got 0. Pass the "
      "data loader's batch size.");
  CHECK_THAT(
      refused(grouped(1).batches_per_bucket(0)),
      ContainsText("expected batches_per_bucket >= 1, got 0"));
  DistributedLengthGroupedSampler sampler({1, 2}, grouped(2));
  CHECK(
      error_of<c10::Error>([&] { sampler.next(3); }) ==
      "DistributedLengthGroupedSampler::next: expected the batch size 2 that the sampler groups "
      "for, got 3. Pass the same to the data loader and to the sampler.");
}

TEST_CASE("every sampler accepts datasets of no sample and of few", "[sampler][pure]") {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{3}}) {
    CAPTURE(size);
    size_t drawn = 0;
    for (int64_t rank = 0; rank < 5; ++rank) {
      DistributedLengthGroupedSampler sampler(random_lengths(size), grouped(2, rank, 5));
      const auto indices = epoch_of(sampler, 2);
      CHECK(indices.size() == (size == 0 ? 0 : 1));
      drawn += indices.size();
    }
    CHECK(drawn == (size == 0 ? 0 : 5));
  }
  DistributedWeightedSampler one({2.0}, weighted(4, 5));
  CHECK(epoch_of(one) == Indices{0});
}
