// The state that a communication hook keeps for each bucket from one step to the next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ddp/comm_hooks.h>
#include <ddp/internal/text.h>

namespace ddp {

/// Keys states by the parameters of a bucket, because buckets are rebuilt after the first step.
/// Drops the states of buckets that no longer exist.
template <typename State>
class BucketStates {
 public:
  /// Returns the state of the bucket; makes a new one if it has none.
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

  /// Calls `visit` with the name and state of every bucket.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& [name, entry] : entries_) visit(name, *entry.state);
  }

  /// Replaces all states.
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

}  // namespace ddp
