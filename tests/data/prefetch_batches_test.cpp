// Types of batches: which are moved, counted and refused.
#include <ddp/prefetch.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "support/error_of.h"

#include "support/catch.h"

namespace photos {

struct Batch {
  at::Tensor images;
  at::Tensor labels;
  std::vector<std::string> names;
};

Batch move_tensors(const Batch& batch, const ddp::TensorMove& to) {
  return {to(batch.images), to(batch.labels), batch.names};
}
size_t batch_size(const Batch& batch) { return batch.names.size(); }

// Declares nothing about itself.
struct Opaque {
  at::Tensor images;
};

}  // namespace photos

namespace ddp {
namespace {

// A device that every build has; tensors there have shapes and no content.
const c10::Device kElsewhere(at::kMeta);

// Returns the batch on the device, and the number of samples that was counted for it.
template <typename Batch>
std::pair<Batch, size_t> moved_and_counted(const Batch& batch) {
  size_t samples = 0;
  auto loader = make_prefetch_loader(
      std::vector<Batch>{batch},
      PrefetchOptions().device(kElsewhere).on_consumed([&](size_t n) { samples = n; }));
  std::vector<Batch> got;
  for (auto& moved : *loader) got.push_back(std::move(moved));
  REQUIRE(got.size() == 1);
  return {got[0], samples};
}

const std::vector<at::Tensor> kTensors{at::Tensor()};

}  // namespace

TEST_CASE("tensors are moved in any type of batch, and samples counted", "[pure][prefetch]") {
  const auto x = torch::ones({5, 2});
  const auto y = torch::ones({5});

  const auto [tensor, in_tensor] = moved_and_counted(x);
  CHECK(tensor.is_meta());
  CHECK(in_tensor == 5);

  const auto [example, in_example] = moved_and_counted(torch::data::Example<>(x, y));
  CHECK(example.data.is_meta());
  CHECK(example.target.is_meta());
  CHECK(in_example == 5);

  const auto [unlabeled, in_unlabeled] = moved_and_counted(torch::data::TensorExample(x));
  CHECK(unlabeled.data.is_meta());
  CHECK(in_unlabeled == 5);

  using Labeled = torch::data::Example<at::Tensor, int>;
  const auto [examples, in_examples] = moved_and_counted(std::vector<Labeled>{{x, 1}, {x, 2}});
  CHECK(examples[1].data.is_meta());
  CHECK(examples[1].target == 2);
  CHECK(in_examples == 2);

  const auto [pair, in_pair] = moved_and_counted(std::make_pair(x, at::Tensor()));
  CHECK(pair.first.is_meta());
  CHECK_FALSE(pair.second.defined());
  CHECK(in_pair == 5);

  const auto [own, in_own] = moved_and_counted(photos::Batch{x, y, {"a", "b", "c"}});
  CHECK(own.images.is_meta());
  CHECK(own.labels.is_meta());
  CHECK(own.names.size() == 3);
  CHECK(in_own == 3);

  CHECK(x.is_cpu());
}

TEST_CASE("without a device, and to the CPU, tensors are not copied", "[pure][prefetch]") {
  const auto x = torch::ones({5, 2});
  const std::vector<at::Tensor> batches{x};
  auto stays = make_prefetch_loader(batches);
  for (const auto& batch : *stays) CHECK(batch.is_same(x));
  auto to_cpu = make_prefetch_loader(batches, PrefetchOptions().device(at::kCPU));
  for (const auto& batch : *to_cpu) CHECK(batch.is_same(x));
}

TEST_CASE("a transform's results are moved, and its inputs are counted", "[pure][prefetch]") {
  const std::vector<at::Tensor> batches{torch::ones({5, 2}), torch::ones({4, 2})};
  std::vector<size_t> samples;
  const auto named = [](const at::Tensor& batch) {
    return std::map<std::string, at::Tensor>{{"x", batch.narrow(0, 0, 1)}};
  };
  auto loader = make_prefetch_loader(
      batches, named,
      PrefetchOptions().device(kElsewhere).on_consumed([&](size_t n) { samples.push_back(n); }));
  for (const auto& batch : *loader) {
    CHECK(batch.at("x").is_meta());
    CHECK(batch.at("x").size(0) == 1);
  }
  CHECK(samples == std::vector<size_t>{0, 5, 4});
}

TEST_CASE("invalid prefetch options are refused", "[errors][prefetch]") {
  const auto with = [](const PrefetchOptions& options) {
    return testing::error_of<c10::ValueError>([&] { make_prefetch_loader(kTensors, options); });
  };
  CHECK(
      with(PrefetchOptions().workers(0)) ==
      "PrefetchOptions: expected workers >= 1, got 0. To prepare batches on the loop's own thread, "
      "loop over the inner loader.");
  CHECK_THAT(with(PrefetchOptions().workers(-3)), ContainsText("got -3"));
  CHECK(
      with(PrefetchOptions().depth(0)) ==
      "PrefetchOptions: expected depth >= 1, got 0. Pass the number of batches to prepare ahead of "
      "the loop, or leave it unset.");
  CHECK(
      with(PrefetchOptions().device(c10::Device(at::kXLA, 0))) ==
      "PrefetchOptions: expected device to be there, got xla:0 and 0 devices of type xla. Choose "
      "another, or leave device unset to keep batches where they are.");
  CHECK_THAT(
      with(PrefetchOptions().device(c10::Device(at::kMeta, 7))),
      ContainsText("got meta:7 and 1 devices of type meta"));
  CHECK(with(PrefetchOptions()).empty());
}

TEST_CASE("a null pointer is not a loader", "[errors][prefetch]") {
  CHECK(
      testing::error_of<c10::ValueError>(
          [] { make_prefetch_loader(std::unique_ptr<std::vector<at::Tensor>>()); }) ==
      "make_prefetch_loader: expected a loader to draw batches from, got a null pointer. Pass what "
      "torch::data::make_data_loader returned.");
}

TEST_CASE("batches that cannot be moved or counted are refused", "[errors][prefetch]") {
  const std::vector<photos::Opaque> batches(1);
  CHECK(
      testing::error_of<c10::ValueError>(
          [&] { make_prefetch_loader(batches, PrefetchOptions().device(kElsewhere)); }) ==
      "PrefetchOptions: expected batches whose tensors can be found, to copy them to meta, got "
      "photos::Opaque. Declare `T move_tensors(const T& batch, const ddp::TensorMove& to)` beside "
      "that type, or leave device unset and copy in the loop.");
  const auto count = PrefetchOptions().on_consumed([](size_t) {});
  CHECK(
      testing::error_of<c10::ValueError>([&] { make_prefetch_loader(batches, count); }) ==
      "PrefetchOptions: expected batches whose samples can be counted for on_consumed, got "
      "photos::Opaque. Declare `size_t batch_size(const T& batch)` beside that type, or leave "
      "on_consumed unset.");
  // The inner loader's batches are counted and the loop's are moved, not the other way round.
  const auto opened = [](const photos::Opaque& batch) { return batch.images; };
  const auto wrapped = [](const at::Tensor& batch) { return photos::Opaque{batch}; };
  CHECK(testing::error_of<c10::ValueError>([&] {
          make_prefetch_loader(batches, opened, PrefetchOptions().device(kElsewhere));
        }).empty());
  CHECK(testing::error_of<c10::ValueError>([&] {
          make_prefetch_loader(kTensors, wrapped, count);
        }).empty());
}

}  // namespace ddp
