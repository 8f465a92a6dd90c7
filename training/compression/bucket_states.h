// What a communication hook keeps of each bucket from one step to the next.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ddp/comm_hooks.h>
#include <ddp/internal/text.h>

namespace ddp {

/// States by what a bucket holds, for buckets are rebuilt after the first step. Those of buckets
/// that come no more are dropped.
template <typename State>
class BucketStates {
 public:
  /// The state of the bucket, a new one if it has none.
  std::shared_ptr<State> of(const GradBucket& bucket) {
    auto& entry = entries_[name_of(bucket)];
    if (!entry.state) entry.state = std::make_shared<State>();
    entry.last_pass = passes_;
    return entry.state;
  }

  /// After the last bucket of a step.
  void end_pass() {
    // The buckets of the first step, and of one with static_graph the second's, come no more.
    constexpr int64_t kPassesToSettle = 3;
    if (++passes_ < kPassesToSettle) return;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      const bool is_used = entry->second.last_pass + 1 == passes_;
      entry = is_used ? std::next(entry) : entries_.erase(entry);
    }
  }

  /// With the name of every bucket.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& [name, entry] : entries_) visit(name, *entry.state);
  }

  /// Begins anew with these.
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
