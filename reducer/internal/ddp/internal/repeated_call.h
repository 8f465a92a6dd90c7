#pragma once

#include <cstdint>

namespace ddp {

/// The call of a function that checkpoint() runs on this thread, in forward or again in backward:
/// the same number both times, also for calls within it. 0: none.
int64_t repeated_call();

int64_t new_repeated_call();

/// While it exists, repeated_call() of this thread is the given number.
class RepeatedCallScope {
 public:
  explicit RepeatedCallScope(int64_t call);
  ~RepeatedCallScope();
  RepeatedCallScope(const RepeatedCallScope&) = delete;
  RepeatedCallScope& operator=(const RepeatedCallScope&) = delete;

 private:
  const int64_t before_;
};

}  // namespace ddp
