#include <ddp/prefetch.h>

#include <iostream>
#include <vector>

#include <torch/torch.h>

#include "support/catch.h"

namespace ddp {

TEST_CASE("batches reach a GPU whole, while the loop keeps it busy", "[cuda][prefetch]") {
  if (!torch::cuda::is_available()) {
    std::cout << "skipped: no CUDA device\n";
    return;
  }
  const int64_t workers = GENERATE(1, 3);
  CAPTURE(workers);
  const c10::Device gpu(at::kCUDA, 0);
  constexpr int kBatches = 50;
  std::vector<torch::data::Example<>> batches;
  for (int i = 0; i < kBatches; ++i) {
    batches.emplace_back(torch::full({64, 1 << 16}, float(i)), torch::full({64}, i, at::kLong));
  }
  const auto plus_one = [](torch::data::Example<> batch) {
    batch.data = batch.data + 1;
    return batch;
  };
  auto loader =
      make_prefetch_loader(batches, plus_one, PrefetchOptions().workers(workers).device(at::kCUDA));
  // Long enough for a later batch to overwrite memory that is released too early.
  const auto weight = torch::randn({2048, 2048}, gpu);
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<at::Tensor> low, high, labels;
    for (const auto& batch : *loader) {
      CHECK(batch.data.device() == gpu);
      CHECK(batch.target.device() == gpu);
      auto busy = weight;
      for (int i = 0; i < 5; ++i) busy = busy.mm(weight).tanh();
      const auto data = batch.data + 0 * busy[0][0].nan_to_num();
      low.push_back(data.min());
      high.push_back(data.max());
      labels.push_back(batch.target.max());
    }
    REQUIRE(low.size() == kBatches);
    const auto expected = torch::arange(kBatches) + 1;
    CHECK(torch::equal(torch::stack(low).cpu(), expected.to(at::kFloat)));
    CHECK(torch::equal(torch::stack(high).cpu(), expected.to(at::kFloat)));
    CHECK(torch::equal(torch::stack(labels).cpu(), torch::arange(kBatches)));
  }
}

}  // namespace ddp
