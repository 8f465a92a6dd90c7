// Parts of data sets, and several as one.
#include <ddp/datasets.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <ddp/prefetch.h>
#include <ddp/sampler.h>
#include <torch/torch.h>

#include "support/error_of.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;
namespace datasets = torch::data::datasets;
using Stack = torch::data::transforms::Stack<>;
using Lists = std::vector<std::vector<size_t>>;

/// Sample i has the data `first + i` and the target 10 times that; counts the batches it is asked
/// for.
class CountedSamples : public datasets::Dataset<CountedSamples> {
 public:
  explicit CountedSamples(size_t size, float first = 0)
      : size_(size), first_(first), batches_(std::make_shared<int>(0)) {}
  torch::data::Example<> get(size_t index) override {
    TORCH_CHECK(index < size_, "no such sample");
    const auto value = first_ + static_cast<float>(index);
    return {torch::full({1}, value), torch::full({}, 10 * value)};
  }
  std::vector<torch::data::Example<>> get_batch(c10::ArrayRef<size_t> indices) override {
    ++*batches_;
    return Dataset::get_batch(indices);
  }
  std::optional<size_t> size() const override { return size_; }
  int batches() const { return *batches_; }

 private:
  size_t size_;
  float first_;
  std::shared_ptr<int> batches_;
};

struct Unsized : datasets::Dataset<Unsized> {
  torch::data::Example<> get(size_t /*index*/) override { return {}; }
  std::optional<size_t> size() const override { return std::nullopt; }
};

template <typename D>
Lists indices_of(const std::vector<Subset<D>>& parts) {
  Lists lists;
  for (const auto& part : parts) lists.push_back(part.indices());
  return lists;
}

template <typename D>
std::vector<size_t> sizes_of(const std::vector<Subset<D>>& parts) {
  std::vector<size_t> sizes;
  for (const auto& part : parts) sizes.push_back(*part.size());
  return sizes;
}

std::vector<float> values(const std::vector<torch::data::Example<>>& samples) {
  std::vector<float> values;
  for (const auto& sample : samples) values.push_back(sample.data.item<float>());
  return values;
}

}  // namespace

// The expected numbers: torch.utils.data.random_split, torch 2.11.0.
TEST_CASE("random_split has Python's parts for a seed", "[pure][datasets]") {
  CHECK(
      indices_of(random_split(CountedSamples(10), {0.5, 0.3, 0.2}, 42)) ==
      Lists{{2, 6, 1, 8, 4}, {5, 0, 9}, {3, 7}});
  CHECK(
      indices_of(random_split(CountedSamples(7), std::vector<double>(3, 1.0 / 3), 3)) ==
      Lists{{5, 3, 4}, {6, 0}, {2, 1}});
  CHECK(
      indices_of(random_split(CountedSamples(10), {3, 7}, 42)) ==
      Lists{{2, 6, 1}, {8, 4, 5, 0, 9, 3, 7}});
  CHECK(
      indices_of(random_split(CountedSamples(12), std::vector<int64_t>{5, 0, 7}, 7)) ==
      Lists{{3, 4, 0, 5, 7}, {}, {9, 11, 6, 8, 1, 10, 2}});
  const auto large = random_split(CountedSamples(60000), {0.9, 0.1}, 1);  // of another algorithm
  CHECK(sizes_of(large) == std::vector<size_t>{54000, 6000});
  CHECK(large[0].indices().front() == 35845);
  CHECK(large[1].indices().back() == 12053);
}

TEST_CASE("random_split rounds down, and deals out what is left", "[pure][datasets]") {
  using Sizes = std::vector<size_t>;
  const auto sizes = [](size_t size, const std::vector<double>& fractions) {
    return sizes_of(random_split(CountedSamples(size), fractions, 1));
  };
  CHECK(sizes(10, std::vector<double>(3, 1.0 / 3)) == Sizes{4, 3, 3});
  CHECK(sizes(7, {0.25, 0.25, 0.25, 0.25}) == Sizes{2, 2, 2, 1});
  CHECK(sizes(2, {0.3, 0.3, 0.4}) == Sizes{1, 1, 0});
  CHECK(sizes(100, {0.7, 0.2, 0.1}) == Sizes{70, 20, 10});  // whose sum is below 1
  CHECK(sizes(11, {0.0, 0.5, 0.5}) == Sizes{1, 5, 5});
  CHECK(sizes(0, {0.5, 0.5}) == Sizes{0, 0});
  CHECK(sizes(9, std::vector<double>(10, 0.1)) == Sizes{1, 1, 1, 1, 1, 1, 1, 1, 1, 0});
  CHECK(sizes(4, {1.0}) == Sizes{4});
  CHECK(sizes(10, {0.5, 0.5 + 4e-10}) == Sizes{5, 5});
}

TEST_CASE("parts have every sample once, and other seeds others", "[pure][datasets]") {
  for (const size_t size : {1, 2, 17, 1000}) {
    const auto parts = indices_of(random_split(CountedSamples(size), {0.6, 0.3, 0.1}, size));
    std::vector<size_t> all, expected(size);
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    std::sort(all.begin(), all.end());
    std::iota(expected.begin(), expected.end(), size_t{0});
    CHECK(all == expected);
  }
  const CountedSamples dataset(100);
  CHECK(
      indices_of(random_split(dataset, {0.5, 0.5}, 1)) !=
      indices_of(random_split(dataset, {0.5, 0.5}, 2)));
}

TEST_CASE("random_split refuses what does not divide the data set", "[pure][datasets][errors]") {
  const CountedSamples ten(10);
  const auto error_for = [&](const auto& parts) {
    return error_of<c10::ValueError>([&] { random_split(ten, parts, 1); });
  };
  using Fractions = std::vector<double>;
  using Lengths = std::vector<int64_t>;
  CHECK_THAT(
      error_for(Fractions{0.5, 0.4}),
      ContainsText(
          "random_split: expected fractions whose sum is 1, got {0.5, 0.4}, whose sum is"));
  CHECK_THAT(error_for(Fractions{0.5, 0.6}), ContainsText("whose sum is 1.1"));
  CHECK_THAT(error_for(Fractions{}), ContainsText("whose sum is 0"));
  CHECK_THAT(
      error_for(Fractions{1.5, -0.5}),
      ContainsText("expected fractions from 0 to 1, got 1.5 at position 0"));
  CHECK_THAT(error_for(Fractions{std::nan("")}), ContainsText("expected fractions from 0 to 1"));
  for (const auto& lengths :
       {Lengths{3, 8}, Lengths{3, 6}, Lengths{-1, 11}, Lengths{}, Lengths{1, 0}}) {
    CHECK_THAT(
        error_for(lengths),
        ContainsText(
            "random_split: expected lengths of at least 0 whose sum is 10, the data set's"));
  }
  CHECK_THAT(
      error_of<c10::ValueError>([] {
        random_split(Unsized(), {0.5, 0.5}, 1);
      }),
      ContainsText("random_split: expected a data set that says its size()"));
}

TEST_CASE("a subset has the samples of its indices", "[pure][datasets]") {
  Subset subset(CountedSamples(10, 100), {7, 2, 2});
  CHECK(subset.size() == size_t{3});
  CHECK(values(subset.get_batch({2, 0})) == std::vector<float>{102, 107});
  CHECK(subset.get(0).target.item<float>() == 1070);
  CHECK(subset.dataset().batches() == 2);
  Subset nested(subset, {2, 0});
  CHECK(values(nested.get_batch({0, 1})) == std::vector<float>{102, 107});
  CHECK_THAT(
      error_of<c10::ValueError>([&] {
        subset.get_batch({0, 3});
      }),
      ContainsText("Subset: expected the number of a sample, below its size 3, got 3"));
  CHECK_THAT(
      error_of<c10::ValueError>([] {
        Subset(CountedSamples(4), {1, 4});
      }),
      ContainsText("Subset: expected indices below 4, the data set's size, got 4 at position 1"));
}

TEST_CASE("parts of shared data sets use one, and of mapped ones the batch", "[pure][datasets]") {
  auto parts = random_split(datasets::make_shared_dataset<CountedSamples>(6), {0.5, 0.5}, 3);
  CHECK(&*parts[0].dataset() == &*parts[1].dataset());
  CHECK(parts[0].get(1).data.item<float>() == static_cast<float>(parts[0].indices()[1]));
  auto stacked = random_split(CountedSamples(6).map(Stack()), {4, 2}, 3);
  const auto batch = stacked[0].get_batch({0, 1, 2});
  CHECK(batch.data.sizes() == at::IntArrayRef{3, 1});
  CHECK(batch.data[2].item<float>() == static_cast<float>(stacked[0].indices()[2]));
}

TEST_CASE("a concatenation numbers its parts one after the other", "[pure][datasets]") {
  const CountedSamples first(3), empty(0), last(2, 50);
  ConcatDataset all({first, empty, last});
  CHECK(all.size() == size_t{5});
  CHECK(all.datasets().size() == 3);
  CHECK(values(all.get_batch({4, 0, 3, 2, 0})) == std::vector<float>{51, 0, 50, 2, 0});
  CHECK((first.batches() == 1 && empty.batches() == 0 && last.batches() == 1));
  CHECK(all.get(3).data.item<float>() == 50);
  CHECK(all.get_batch({}).empty());
  CHECK_THAT(
      error_of<c10::ValueError>([&] { all.get(5); }),
      ContainsText("ConcatDataset: expected the number of a sample, below its size 5, got 5"));
  CHECK_THAT(
      error_of<c10::ValueError>([] { ConcatDataset(std::vector<CountedSamples>()); }),
      ContainsText("ConcatDataset: expected at least one data set, got none"));
  CHECK_THAT(
      error_of<c10::ValueError>([] { ConcatDataset({Unsized()}); }),
      ContainsText(
          "expected data sets that say their size(), got one that does not at position 0"));
}

TEST_CASE("a data set that leaves out samples is an error", "[pure][datasets][errors]") {
  class WithoutOdd : public datasets::Dataset<WithoutOdd> {
   public:
    torch::data::Example<> get(size_t index) override {
      return {torch::full({1}, static_cast<float>(index)), torch::Tensor()};
    }
    std::vector<torch::data::Example<>> get_batch(c10::ArrayRef<size_t> indices) override {
      std::vector<torch::data::Example<>> samples;
      for (const auto index : indices) {
        if (index % 2 == 0) samples.push_back(get(index));
      }
      return samples;
    }
    std::optional<size_t> size() const override { return 4; }
  };
  ConcatDataset<WithoutOdd> both({WithoutOdd(), WithoutOdd()});
  const std::string text = ": expected a data set that gives a sample for each number, got ";
  const std::vector<size_t> numbers{0, 1, 6};
  CHECK_THAT(
      error_of<c10::Error>([&] { both.get_batch(numbers); }),
      ContainsText("ConcatDataset" + text + "1 for 2. Leave out samples by a Subset"));
  Subset<WithoutOdd> odd(WithoutOdd(), {1, 3});
  CHECK_THAT(error_of<c10::Error>([&] { odd.get(0); }), ContainsText("Subset" + text + "0 for 1"));
  CHECK(both.get(6).data.item<float>() == 2);
}

TEST_CASE("loaders and samplers draw all samples of parts and concatenations", "[pure][datasets]") {
  const size_t workers = GENERATE(0, 2);
  const auto parts =
      random_split(ConcatDataset({CountedSamples(8), CountedSamples(5, 100)}), {0.7, 0.3}, 1);
  std::vector<float> drawn;
  for (const auto& part : parts) {
    for (size_t rank = 0; rank < 2; ++rank) {
      DistributedSampler sampler(
          *part.size(), DistributedSamplerOptions().num_replicas(2).rank(rank).drop_last(false));
      auto inner = part;
      auto loader = make_prefetch_loader(
          torch::data::make_data_loader(
              inner.map(Stack()), sampler, torch::data::DataLoaderOptions(2).workers(workers)),
          PrefetchOptions());
      for (auto& batch : *loader) {
        CHECK(batch.target.equal(10 * batch.data.flatten()));
        for (int64_t i = 0; i < batch.data.size(0); ++i) {
          drawn.push_back(batch.data[i].template item<float>());
        }
      }
    }
  }
  std::sort(drawn.begin(), drawn.end());
  drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());  // padding repeats some
  CHECK(drawn == std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 102, 103, 104});
}

}  // namespace ddp
