// Ranks notice that they have different items under the same numbers.
#include <ddp/sampler.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "support/ranks.h"

#include "support/catch.h"

namespace {

using ddp::DistributedSampler;
using ddp::DistributedSamplerOptions;
using namespace ddp::testing;

// Images of one number each, and labels: an item of a class that LibTorch does not know.
using Item = std::pair<std::vector<float>, std::string>;

struct Pictures : torch::data::datasets::Dataset<Pictures, Item> {
  explicit Pictures(std::vector<float> numbers) : numbers_(std::move(numbers)) {}
  Item get(size_t index) override {
    TORCH_CHECK(numbers_.at(index) >= 0, "no such file");
    return {{numbers_[index]}, "a picture"};
  }
  std::optional<size_t> size() const override { return numbers_.size(); }
  std::vector<float> numbers_;
};

// A struct that ItemHash does not know, for map().
struct Song {
  torch::Tensor notes;
  int64_t year = 0;
  std::string title;
};

struct Songs : torch::data::datasets::Dataset<Songs, Song> {
  explicit Songs(Song first) : first_(std::move(first)) {}
  Song get(size_t index) override {
    return index == 0 ? first_ : Song{torch::ones({4}), 2000, "a song"};
  }
  std::optional<size_t> size() const override { return 20; }
  Song first_;
};

DistributedSamplerOptions options_of(const Rank& self) {
  return DistributedSamplerOptions().num_replicas(self.size).rank(self.rank);
}

// Returns the errors of the ranks for data sets of 20 items that `change` changed on rank 1.
std::vector<std::string> errors_with(const std::function<void(std::vector<float>&)>& change) {
  return errors_of_ranks(3, [&](const Rank& self) {
    std::vector<float> numbers(20, 1);
    if (self.rank == 1) change(numbers);
    Pictures pictures(numbers);
    DistributedSampler(numbers.size(), options_of(self)).check_dataset(pictures, 16, self.group);
  });
}

void check_all_throw(const std::vector<std::string>& errors, const std::string& text) {
  for (const auto& error : errors) {
    CHECK_THAT(error, ContainsText(text));
    CHECK(error == errors.front());
  }
}

TEST_CASE("equal data sets pass, whatever they hold", "[sampler][ranks]") {
  const std::vector<std::string> none{"", "", ""};
  CHECK(errors_with([](auto&) {}) == none);
  CHECK(errors_of_ranks(3, [](const Rank& self) {
          const auto data = torch::arange(60).view({20, 3});
          auto examples = torch::data::datasets::TensorDataset(data);
          auto stacked = torch::data::datasets::TensorDataset(data).map(
              torch::data::transforms::Stack<torch::data::TensorExample>());
          const DistributedSampler sampler(20, options_of(self));
          sampler.check_dataset(examples, 16, self.group);
          sampler.check_dataset(stacked, 100, self.group);
          Pictures empty({});
          DistributedSampler(0, options_of(self)).check_dataset(empty, 16, self.group);
        }) == none);
}

TEST_CASE(
    "a different item among the first ones is found on every rank", "[sampler][ranks][errors]") {
  check_all_throw(
      errors_with([](auto& numbers) { numbers[15] = 2; }),
      "DistributedSampler::check_dataset: expected the same data set on every rank, got another "
      "size, or other items among the first 16, than rank 0's on rank 1 of 3. Construct the "
      "sampler and the data set alike");
  // The item is not among the first ones.
  CHECK(errors_with([](auto& numbers) { numbers[16] = 2; })[0] == "");
}

TEST_CASE("every member of a mapped struct is compared", "[sampler][ranks][errors]") {
  using Members = std::tuple<torch::Tensor, int64_t, std::string>;
  const auto errors_with_first = [](const Song& other) {
    return errors_of_ranks(2, [&](const Rank& self) {
      Songs songs(self.rank == 1 ? other : Song{torch::ones({4}), 2000, "a song"});
      auto members = songs.map(torch::data::transforms::Lambda<Song, Members>(
          [](const Song& song) { return std::make_tuple(song.notes, song.year, song.title); }));
      DistributedSampler(20, options_of(self)).check_dataset(members, 16, self.group);
    });
  };
  CHECK(errors_with_first({torch::ones({4}), 2000, "a song"}) == std::vector<std::string>{"", ""});
  check_all_throw(errors_with_first({torch::zeros({4}), 2000, "a song"}), "other items among");
  check_all_throw(errors_with_first({torch::ones({4}), 2001, "a song"}), "other items among");
  check_all_throw(errors_with_first({torch::ones({4}), 2000, "another"}), "other items among");
}

TEST_CASE("different sampler options are named on every rank", "[sampler][ranks][errors]") {
  check_all_throw(
      errors_with([](auto& numbers) { numbers.resize(19); }),
      "expected the same order on every rank, got dataset_size=20 on rank 0 and dataset_size=19 on "
      "rank 1 of 3.");
  using Change = std::function<void(DistributedSampler&, DistributedSamplerOptions&)>;
  const auto text_with = [](const Change& change) {
    return error_of_all(2, [&](const Rank& self) {
      Pictures pictures(std::vector<float>(20, 1));
      auto options = options_of(self);
      DistributedSampler unused(20, options);
      if (self.rank == 1) change(unused, options);
      DistributedSampler sampler(20, options);
      if (self.rank == 1) change(sampler, options);
      sampler.check_dataset(pictures, 16, self.group);
    });
  };
  CHECK_THAT(
      text_with([](auto&, auto& options) { options.seed(1234); }),
      ContainsText("got seed=0 on rank 0 and seed=1234 on rank 1 of 2."));
  CHECK_THAT(
      text_with([](auto&, auto& options) { options.shuffle(false); }),
      ContainsText("got shuffle=1 on rank 0 and shuffle=0 on rank 1 of 2."));
  CHECK_THAT(
      text_with([](auto& sampler, auto&) { sampler.set_epoch(3); }),
      ContainsText("got epoch=0 on rank 0 and epoch=3 on rank 1 of 2."));
}

TEST_CASE(
    "a rank that cannot load its items fails all ranks and hangs none",
    "[sampler][ranks][errors]") {
  check_all_throw(
      errors_with([](auto& numbers) { numbers[2] = -1; }),
      "check_dataset: expected every rank to load its first 16 items, got an error on rank 1 of 3: "
      "no such file");
}

}  // namespace
