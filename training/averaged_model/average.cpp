#include "averaged_model/average.h"

#include <algorithm>

#include <ATen/ATen.h>

namespace ddp {
namespace {

/// Pairs of one dtype on one device, which a foreach kernel takes at once.
std::vector<AveragePairs> pairs_by_kind(const AveragePairs& pairs) {
  std::vector<AveragePairs> kinds;
  for (size_t i = 0; i < pairs.averages.size(); ++i) {
    const auto& average = pairs.averages[i];
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const AveragePairs& kind) {
      return kind.averages[0].scalar_type() == average.scalar_type() &&
             kind.averages[0].device() == average.device();
    });
    auto& kind = found == kinds.end() ? kinds.emplace_back() : *found;
    kind.averages.push_back(average);
    kind.values.push_back(pairs.values[i]);
  }
  return kinds;
}

// In float, and cut off, as Python's functions leave integers.
void average_integers(const AveragePairs& kind, int64_t n_averaged, std::optional<double> decay) {
  for (size_t i = 0; i < kind.averages.size(); ++i) {
    const auto& average = kind.averages[i];
    const auto& value = kind.values[i];
    if (decay) {
      average.copy_(average * *decay + value * (1 - *decay));
    } else {
      average.copy_(average + (value - average) / (n_averaged + 1));
    }
  }
}

// Python's default has another order of operations on the CPU than elsewhere.
void average_equally(const AveragePairs& kind, int64_t n_averaged) {
  if (!kind.averages[0].is_cpu()) {
    return at::_foreach_lerp_(
        kind.averages, kind.values, 1.0 / static_cast<double>(n_averaged + 1));
  }
  for (size_t i = 0; i < kind.averages.size(); ++i) {  // one temporary at a time
    const auto& average = kind.averages[i];
    average.add_((kind.values[i] - average).div_(n_averaged + 1));
  }
}

}  // namespace

double decay_in_warmup(double decay, int64_t n_averaged) {
  const auto n = static_cast<double>(n_averaged);
  return std::min(decay, (1 + n) / (10 + n));
}

AveragePairs on_devices_of_averages(const AveragePairs& pairs) {
  auto moved = pairs;
  for (size_t i = 0; i < moved.values.size(); ++i) {
    const auto device = moved.averages[i].device();
    if (moved.values[i].device() != device) moved.values[i] = moved.values[i].to(device);
  }
  return moved;
}

void copy_values(const AveragePairs& pairs) {
  if (!pairs.averages.empty()) at::_foreach_copy_(pairs.averages, pairs.values);
}

void average_values(const AveragePairs& pairs, int64_t n_averaged, std::optional<double> decay) {
  for (const auto& kind : pairs_by_kind(pairs)) {
    const auto dtype = kind.averages[0].scalar_type();
    if (dtype == at::kBool) {
      copy_values(kind);
    } else if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
      average_integers(kind, n_averaged, decay);
    } else if (decay) {
      at::_foreach_lerp_(kind.averages, kind.values, 1 - *decay);
    } else {
      average_equally(kind, n_averaged);
    }
  }
}

}  // namespace ddp
