#include "order.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randperm.h>

namespace ddp {
namespace {

at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// Only LibTorch's own randperm gives Python's order: its algorithm depends on the size.
at::Tensor permutation(int64_t size, at::Generator generator) {
  return at::randperm(size, std::move(generator), at::TensorOptions().dtype(at::kLong));
}

// FNV-1a. It only has to distinguish one run's weights from another's, not withstand an adversary.
class Fingerprint {
 public:
  Fingerprint& add(const void* data, size_t bytes) {
    const auto* byte = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) state_ = (state_ ^ byte[i]) * 0x100000001B3;
    return *this;
  }
  Fingerprint& add(int64_t value) { return add(&value, sizeof(value)); }
  int64_t value() const { return static_cast<int64_t>(state_); }

 private:
  uint64_t state_ = 0xCBF29CE484222325;
};

// Sorts each bucket of `samples` by length; ties keep their (shuffled) order.
void sort_buckets(
    int64_t* samples, int64_t size, int64_t bucket_size, const std::vector<int64_t>& lengths) {
  for (int64_t begin = 0; begin < size; begin += bucket_size) {
    const int64_t end = begin + std::min(bucket_size, size - begin);
    std::stable_sort(samples + begin, samples + end, [&](int64_t a, int64_t b) {
      return lengths[static_cast<size_t>(a)] < lengths[static_cast<size_t>(b)];
    });
  }
}

// Returns the full steps of `samples` in the order `steps`, and the step that is not full after
// them.
at::Tensor reordered(const at::Tensor& samples, const at::Tensor& steps, int64_t step_size) {
  at::Tensor result = at::empty_like(samples);
  const int64_t* from = samples.const_data_ptr<int64_t>();
  const int64_t* step = steps.const_data_ptr<int64_t>();
  int64_t* to = result.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < steps.numel(); ++i) {
    to = std::copy_n(from + step[i] * step_size, step_size, to);
  }
  std::copy(from + steps.numel() * step_size, from + samples.numel(), to);
  return result;
}

}  // namespace

Order permuted_order(int64_t dataset_size, bool shuffle) {
  Order order;
  order.dataset_size = dataset_size;
  order.size = dataset_size;
  order.shuffled = shuffle;
  order.resizable = true;
  order.draw = [shuffle](int64_t size, uint64_t seed, int64_t) {
    return shuffle ? permutation(size, seeded(seed)) : at::Tensor();
  };
  return order;
}

Order weighted_order(const at::Tensor& weights, int64_t num_samples, bool replacement) {
  Order order;
  order.dataset_size = weights.numel();
  order.size = num_samples;
  order.fingerprint = Fingerprint()
                          .add(weights.const_data_ptr<double>(), weights.nbytes())
                          .add(static_cast<int64_t>(replacement))
                          .value();
  order.draw = [weights, replacement](int64_t size, uint64_t seed, int64_t) {
    return at::multinomial(weights, size, replacement, seeded(seed));
  };
  return order;
}

Order length_grouped_order(std::vector<int64_t> lengths, int64_t steps_per_bucket, bool shuffle) {
  Order order;
  order.dataset_size = static_cast<int64_t>(lengths.size());
  order.size = order.dataset_size;
  order.shuffled = shuffle;
  order.depends_on_step_size = true;
  order.fingerprint = Fingerprint()
                          .add(lengths.data(), lengths.size() * sizeof(int64_t))
                          .add(steps_per_bucket)
                          .value();
  const auto shared = std::make_shared<const std::vector<int64_t>>(std::move(lengths));
  order.draw = [=](int64_t size, uint64_t seed, int64_t step_size) {
    const auto generator = seeded(seed);
    at::Tensor samples =
        shuffle ? permutation(size, generator) : at::arange(size, at::TensorOptions(at::kLong));
    // A bucket never needs more steps than there are; a larger number could overflow.
    const int64_t bucket_size = std::min(steps_per_bucket, size / step_size + 1) * step_size;
    sort_buckets(samples.mutable_data_ptr<int64_t>(), size, bucket_size, *shared);
    if (!shuffle) return samples;
    return reordered(samples, permutation(size / step_size, generator), step_size);
  };
  return order;
}

int64_t sample_count(const ShardSpec& spec) {
  const int64_t rest = std::max<int64_t>(spec.order_size - spec.offset, 0);
  switch (spec.tail) {
    case Tail::kRepeat:
      return (rest + spec.num_replicas - 1) / spec.num_replicas;
    case Tail::kDrop:
      return rest / (spec.num_replicas * spec.batch_size) * spec.batch_size;
    case Tail::kUneven:
      return (std::max<int64_t>(rest - spec.rank, 0) + spec.num_replicas - 1) / spec.num_replicas;
  }
  return 0;
}

std::vector<size_t> take_shard(const at::Tensor& order, const ShardSpec& spec) {
  std::vector<size_t> indices(static_cast<size_t>(sample_count(spec)));
  const int64_t* samples = order.defined() ? order.const_data_ptr<int64_t>() : nullptr;
  int64_t position = spec.offset + spec.rank;
  for (auto& index : indices) {
    const int64_t wrapped = position % spec.order_size;
    index = static_cast<size_t>(samples != nullptr ? samples[wrapped] : wrapped);
    position += spec.num_replicas;
  }
  return indices;
}

}  // namespace ddp
