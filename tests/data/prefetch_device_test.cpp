// Copies to an accelerator, on a device that this program defines.
#include <ddp/prefetch.h>

#include <set>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include "support/toy_device.h"

#include "support/catch.h"

namespace ddp {
namespace {

namespace toy = testing::toy;

using Examples = std::vector<torch::data::Example<>>;

// Batch i has i in its data and -i in its target.
Examples numbered(int count) {
  Examples batches;
  for (int i = 0; i < count; ++i) {
    batches.emplace_back(torch::full({2, 3}, float(i)), torch::full({2}, float(-i)));
  }
  return batches;
}

float first_of(const at::Tensor& t) { return *static_cast<const float*>(t.data_ptr()); }

}  // namespace

TEST_CASE("the loop's stream waits for a batch that is copied to a device", "[pure][prefetch]") {
  const int64_t workers = GENERATE(1, 3);
  const c10::StreamId loops_stream = GENERATE(0, 9);
  CAPTURE(workers, loops_stream);
  auto& device = toy::Device::get();
  device.forget();
  {
    const c10::StreamGuard guard(toy::stream(loops_stream));
    auto loader = make_prefetch_loader(
        numbered(10), PrefetchOptions().workers(workers).device(at::kPrivateUse1));
    int i = 0;
    std::set<std::pair<void*, c10::StreamId>> expected;
    for (const auto& batch : *loader) {
      CHECK(batch.data.device() == c10::Device(at::kPrivateUse1, 0));
      // Only a wait for the copies completes them.
      CHECK(first_of(batch.data) == float(i));
      CHECK(first_of(batch.target) == float(-i));
      expected.insert(
          {{batch.data.data_ptr(), loops_stream}, {batch.target.data_ptr(), loops_stream}});
      CHECK(device.recorded == expected);
      ++i;
    }
    CHECK(i == 10);
  }
  CHECK(device.waits == std::vector<c10::StreamId>(10, loops_stream));
  CHECK(device.copies.size() == 20);
  for (const auto& copy : device.copies) {
    CHECK(copy.stream == toy::kPoolStream);
    CHECK(copy.pinned);
    CHECK(copy.non_blocking);
  }
  CHECK(device.events == 0);
}

TEST_CASE("a loop on a device that ends early leaves no event", "[pure][prefetch]") {
  auto& device = toy::Device::get();
  device.forget();
  {
    auto loader = make_prefetch_loader(
        numbered(10), PrefetchOptions().workers(2).depth(4).device(at::kPrivateUse1));
    for (const auto& batch : *loader) {
      CHECK(first_of(batch.data) == 0);
      break;
    }
  }
  CHECK(device.events == 0);
  CHECK(device.waits.size() == 1);
}

TEST_CASE(
    "a transform runs on the side stream, and its device tensors are kept", "[pure][prefetch]") {
  auto& device = toy::Device::get();
  device.forget();
  const c10::Device second(at::kPrivateUse1, 1);
  std::vector<c10::StreamId> streams;
  const auto put = [&](const torch::data::Example<>& batch) {
    streams.push_back(toy::Guard().getStream(second).id());
    return torch::data::Example<>(batch.data.to(second, /*non_blocking=*/true), batch.target);
  };
  auto loader = make_prefetch_loader(numbered(3), put, PrefetchOptions().device(second));
  size_t i = 0;
  for (const auto& batch : *loader) {
    CHECK(batch.data.device() == second);
    CHECK(batch.target.device() == second);
    CHECK(first_of(batch.data) == float(i));
    CHECK(device.recorded.count({batch.data.data_ptr(), 0}) == 1);
    ++i;
  }
  CHECK(i == 3);
  CHECK(streams == std::vector<c10::StreamId>(3, toy::kPoolStream));
  CHECK(toy::Guard().getStream(second).id() == 0);  // the loop's own stream is unchanged
}

TEST_CASE("a batch with gaps is made dense before it is pinned", "[pure][prefetch]") {
  auto& device = toy::Device::get();
  device.forget();
  const auto x = torch::arange(12, torch::kFloat).view({3, 4});
  const std::vector<at::Tensor> batches{x.narrow(1, 1, 2), x.t()};
  auto loader = make_prefetch_loader(batches, PrefetchOptions().device(at::kPrivateUse1));
  std::vector<at::Tensor> got;
  for (const auto& batch : *loader) got.push_back(batch);
  REQUIRE(got.size() == 2);
  CHECK(got[0].is_contiguous());
  const auto* values = static_cast<const float*>(got[0].data_ptr());
  CHECK(std::vector<float>(values, values + 6) == std::vector<float>{1, 2, 5, 6, 9, 10});
  CHECK(got[1].strides() == x.t().strides());  // a dense batch keeps its layout
  CHECK(device.copies.size() == 2);
  for (const auto& copy : device.copies) CHECK(copy.pinned);
}

TEST_CASE("a tensor that a device cannot keep for a stream is refused", "[errors][prefetch]") {
  const std::vector<at::Tensor> batches{torch::eye(2).to_sparse()};
  auto loader = make_prefetch_loader(batches, PrefetchOptions().device(at::kPrivateUse1));
  CHECK_THROWS_WITH(
      *loader->begin(),
      ContainsText("PrefetchLoader: expected strided tensors to copy to") &&
          ContainsText("got one with layout Sparse. Leave device unset and copy the batch in the "
                       "loop."));
}

TEST_CASE("a device that does not exist is refused", "[errors][prefetch]") {
  CHECK_THROWS_WITH(
      make_prefetch_loader(
          numbered(1), PrefetchOptions().device(c10::Device(at::kPrivateUse1, toy::kDevices))),
      ContainsText(":2 and 2 devices of type"));
}

}  // namespace ddp
