// The net that elastic tests train, and its samples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ddp/process_group.h>
#include <ddp/sharded_stream.h>
#include <torch/torch.h>

#include "support/nets.h"

namespace ddp::testing {

inline constexpr size_t kSamples = 36;
inline constexpr size_t kBatch = 3;
inline constexpr size_t kEpochs = 2;

struct ElasticNetImpl : torch::nn::Module {
  ElasticNetImpl() { set_waves(*this, {1.3, 0.2, 0, 0.3}); }
  at::Tensor forward(const at::Tensor& x) { return out(torch::relu(norm(in(x)))); }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 16))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(16))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(16, 2))};
};
TORCH_MODULE(ElasticNet);

struct Sines : torch::data::datasets::Dataset<Sines> {
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<double>(index);
    return {torch::sin(torch::arange(1.0F, 5.0F) * i), torch::cos(torch::arange(1.0F, 3.0F) * i)};
  }
  std::optional<size_t> size() const override { return kSamples; }
};

/// The same samples from a stream, in another order.
inline auto batches_of_stream(const ProcessGroup& group, int workers) {
  const auto numbers = from_generator([](int64_t first) {
    return [i = static_cast<size_t>(first)]() mutable {
      return i < kSamples ? std::optional<size_t>(i++) : std::nullopt;
    };
  });
  const auto sines = transform(numbers, [](size_t index) { return Sines().get(index); });
  return batched(
      make_sharded_stream(
          sines, ShardedStreamOptions()
                     .num_replicas(group->getSize())
                     .rank(group->getRank())
                     .shuffle_buffer(10)
                     .workers(workers)
                     .ends(StreamEnds::Common)),
      kBatch, [](std::vector<torch::data::Example<>> samples) {
        return torch::data::transforms::Stack<>().apply_batch(std::move(samples));
      });
}

}  // namespace ddp::testing
