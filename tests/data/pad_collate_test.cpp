// Batches of samples of uneven length.
#include <ddp/pad_collate.h>

#include <vector>

#include <ddp/datasets.h>
#include <ddp/prefetch.h>
#include <torch/torch.h>

#include "support/error_of.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace ddp::testing;
using torch::data::TensorExample;
using Samples = std::vector<torch::data::Example<>>;

/// Sample i has i + 1 steps of two numbers, and the target i, or one for each step.
class Sentences : public torch::data::datasets::Dataset<Sentences> {
 public:
  explicit Sentences(bool target_by_step) : target_by_step_(target_by_step) {}
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {
        torch::full({i + 1, 2}, i),
        target_by_step_ ? torch::full({i + 1}, i, torch::kLong) : torch::tensor(i)};
  }
  std::optional<size_t> size() const override { return 5; }

 private:
  bool target_by_step_;
};

}  // namespace

TEST_CASE("samples are padded to the longest, and their lengths come along", "[pure][collate]") {
  Sentences sentences(/*target_by_step=*/false);
  const auto batch = pad_collate(sentences.get_batch({1, 0, 3}), /*padding_value=*/-7);
  CHECK(batch.data.sizes() == at::IntArrayRef{3, 4, 2});
  CHECK(batch.lengths.equal(torch::tensor({2, 1, 4}, torch::kLong)));
  CHECK(batch.target.equal(torch::tensor({1, 0, 3}, torch::kLong)));
  CHECK(!batch.target_lengths.defined());
  CHECK(batch_size(batch) == 3);
  for (int64_t i = 0; i < 3; ++i) {
    const auto length = batch.lengths[i].item<int64_t>();
    CHECK(batch.data[i].slice(0, 0, length).eq(batch.target[i]).all().item<bool>());
    CHECK(batch.data[i].slice(0, length).eq(-7).all().item<bool>());
  }
}

TEST_CASE("targets with dimensions are padded by what a loss leaves out", "[pure][collate]") {
  Sentences sentences(/*target_by_step=*/true);
  const auto batch = pad_collate(sentences.get_batch({2, 0}));
  CHECK(batch.data[1].slice(0, 1).eq(0).all().item<bool>());
  CHECK(batch.target.equal(torch::tensor({{2, 2, 2}, {0, -100, -100}}, torch::kLong)));
  CHECK(batch.target_lengths.equal(torch::tensor({3, 1}, torch::kLong)));
}

TEST_CASE("samples without targets are padded alike", "[pure][collate]") {
  const auto batch = pad_collate(std::vector<TensorExample>{torch::ones({2}), torch::ones({1})}, 9);
  CHECK(batch.data.equal(torch::tensor({{1., 1.}, {1., 9.}}, torch::kFloat)));
  CHECK(!batch.target.defined());
  CHECK(PadCollate<TensorExample>(9).apply_batch({torch::ones({2})}).lengths.item<int64_t>() == 2);
}

TEST_CASE("samples that cannot be padded are named", "[pure][collate][errors]") {
  const auto error_for = [](const Samples& samples) {
    return error_of<c10::ValueError>([&] { pad_collate(samples); });
  };
  const auto one = torch::ones({});
  CHECK_THAT(error_for({}), ContainsText("pad_collate: expected at least one sample, got none"));
  CHECK_THAT(error_for({{one, one}}), ContainsText("expected data with a dimension to pad"));
  CHECK_THAT(
      error_for({{torch::ones({2, 3}), one}, {torch::ones({1, 4}), one}}),
      ContainsText("expected data that differs in its first dimension alone, got [2, 3] of Float "
                   "on cpu in sample 0 and [1, 4] of Float on cpu in sample 1"));
  CHECK_THAT(
      error_for({{torch::ones({2}), one}, {torch::ones({2}, torch::kLong), one}}),
      ContainsText("[2] of Long on cpu in sample 1"));
  CHECK_THAT(
      error_for({{torch::ones({2}), one}, {torch::ones({2}), torch::ones({1})}}),
      ContainsText("expected target that differs in its first dimension alone"));
  CHECK_THAT(
      error_for({{torch::ones({2}), at::Tensor()}}),
      ContainsText("expected target in every sample, got none in sample 0"));
}

TEST_CASE("loaders take the batches, and move and count them", "[pure][collate]") {
  auto parts = random_split(Sentences(/*target_by_step=*/true), {4, 1}, 1);
  size_t counted = 0;
  auto loader = make_prefetch_loader(
      torch::data::make_data_loader(
          parts[0].map(PadCollate<>()), torch::data::samplers::SequentialSampler(4), 3),
      PrefetchOptions().device(c10::Device(at::kMeta)).on_consumed([&](size_t n) {
        counted += n;
      }));
  std::vector<int64_t> sizes;
  for (auto& batch : *loader) {
    for (const auto& t : {batch.data, batch.lengths, batch.target, batch.target_lengths}) {
      CHECK(t.is_meta());
    }
    sizes.push_back(batch.data.size(0));
  }
  CHECK(sizes == std::vector<int64_t>{3, 1});
  CHECK(counted == 4);
}

}  // namespace ddp
