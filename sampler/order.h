#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The order in which all ranks together visit a dataset; every rank draws the same.
struct Order {
  /// Samples in the dataset, and positions in an epoch.
  int64_t dataset_size = 0;
  int64_t size = 0;
  /// Whether the order differs from one epoch to the next.
  bool shuffled = true;
  /// Whether dataset_size and size are equal and may change; false where the order comes from
  /// weights or lengths.
  bool resizable = false;
  /// Whether `draw` uses its step_size.
  bool depends_on_step_size = false;
  /// A hash of everything else that decides the order, such as the weights.
  int64_t fingerprint = 0;
  /// Draws the order: [size] int64, or an undefined tensor for 0, 1, 2, ...
  ///
  /// `seed` is the user's plus the epoch. `step_size` is the number of samples that all ranks
  /// together take in a step; only an order that groups samples by step uses it.
  std::function<at::Tensor(int64_t size, uint64_t seed, int64_t step_size)> draw;
};

/// All samples once: shuffled, or 0, 1, 2, ...
Order permuted_order(int64_t dataset_size, bool shuffle);

/// `num_samples` samples drawn by `weights` ([n] double).
Order weighted_order(const at::Tensor& weights, int64_t num_samples, bool replacement);

/// All samples once, in steps of similar lengths: see DistributedLengthGroupedSampler.
Order length_grouped_order(std::vector<int64_t> lengths, int64_t steps_per_bucket, bool shuffle);

}  // namespace ddp
