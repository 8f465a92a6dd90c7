// Whole values of a sharded model, for tests that compare them with one process.
#pragma once

#include <map>
#include <string>

#include <ddp/fully_sharded.h>

namespace ddp::testing {

using NamedValues = std::map<std::string, at::Tensor>;

/// Copies of a module's parameters and buffers, by name.
inline NamedValues named_values(const torch::nn::Module& module) {
  NamedValues values;
  for (const auto& item : module.named_parameters()) {
    values[item.key()] = item.value().detach().clone();
  }
  for (const auto& item : module.named_buffers()) values[item.key()] = item.value().clone();
  return values;
}

/// The same of a sharded model: whole ones.
///
/// Collective: yes.
inline NamedValues summoned_values(FullyShardedBase& model) {
  const SummonFullParams whole(model);
  return named_values(model);
}

/// The largest difference between values of the same names; more than any where names or sizes
/// differ.
inline double largest_difference(const NamedValues& a, const NamedValues& b) {
  if (a.size() != b.size()) return 1e300;
  double largest = 0;
  for (const auto& [name, value] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second.sizes() != value.sizes()) return 1e300;
    if (value.numel() == 0) continue;
    const auto difference = (value - found->second).to(at::kDouble).abs().max().item<double>();
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

}  // namespace ddp::testing
