// The state that a communication hook keeps for each bucket from one step to the next, and whether
// what it got in a step is finite.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ddp/comm_hooks.h>
#include <ddp/internal/text.h>

namespace ddp {

/// Keys states by the parameters of a bucket, because buckets are rebuilt after the first step.
/// Drops the states of buckets that no longer exist.
template <typename State>
class BucketStates {
 public:
  std::shared_ptr<State> of(const GradBucket& bucket) {
    auto& entry = entries_[name_of(bucket)];
    if (!entry.state) entry.state = std::make_shared<State>();
    entry.last_pass = passes_;
    return entry.state;
  }

  /// Call it after the last bucket of a step.
  void end_pass() {
    // The buckets of the first step, and with static_graph of the second, do not come again.
    constexpr int64_t kPassesUntilFinal = 3;
    if (++passes_ < kPassesUntilFinal) return;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const bool is_used = entry->second.last_pass + 1 == passes_;
      entry = is_used ? std::next(entry) : entries_.erase(entry);
    }
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& [name, entry] : entries_) visit(name, *entry.state);
  }

  void assign(std::map<std::string, std::shared_ptr<State>> states) {
    entries_.clear();
    passes_ = 0;
    for (auto& [name, state] : states) entries_[name] = {std::move(state)};
  }

 private:
  struct Entry {
    std::shared_ptr<State> state = {};
    int64_t last_pass = 0;
  };

  static std::string name_of(const GradBucket& bucket) {
    auto name = ddp::str(bucket.index(), ":", bucket.buffer().scalar_type());
    for (const auto& parameter : bucket.parameters()) name += ddp::str(" ", parameter.sizes());
    return name;
  }

  std::map<std::string, Entry> entries_;
  int64_t passes_ = 0;  // since construction or assign
};

/// Whether all elements of all tensors are finite; undefined ones have none.
///
/// \return a bool without dimensions, on the tensors' device, so that the host does not wait for a
///         GPU.
///
/// Cost: reads every element once.
inline at::Tensor all_finite(std::initializer_list<at::Tensor> tensors) {
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor all;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    // NaN is not less.
    const auto is_finite = at::linalg_vector_norm(tensor, kInfinity).lt(kInfinity);
    all = all.defined() ? all.logical_and(is_finite) : is_finite;
  }
  return all.defined() ? all : at::ones({}, at::kBool);
}

}  // namespace ddp
