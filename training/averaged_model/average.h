// Averages of lists of tensors, as Python's swa_utils compute them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// Tensors and their averages, in order.
struct AveragePairs {
  std::vector<at::Tensor> averages;
  std::vector<at::Tensor> values;
};

/// The decay of the update after `n_averaged` others. Source: tf.train.ExponentialMovingAverage
/// with num_updates.
double decay_in_warmup(double decay, int64_t n_averaged);

/// Copies values on other devices to those of the averages.
AveragePairs on_devices_of_averages(const AveragePairs& pairs);

/// Copies each value into its average.
void copy_values(const AveragePairs& pairs);

/// Takes the values into their averages, in place.
///
/// \param pairs  of equal sizes; a pair on one device.
/// \param n_averaged  the values in the averages so far, > 0.
/// \param decay  of an exponential moving average; unset: the mean.
void average_values(const AveragePairs& pairs, int64_t n_averaged, std::optional<double> decay);

}  // namespace ddp
