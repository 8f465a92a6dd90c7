#include "monitor/attempts.h"

#include <algorithm>

namespace ddp {
namespace {

// No averaged pass has more attempts than this.
constexpr uint64_t kAttemptsOfPass = uint64_t{1} << 20;

}  // namespace

void Attempts::begin() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void Attempts::end_pass() {
  const std::lock_guard lock(mutex_);
  count_ = (count_ / kAttemptsOfPass + 1) * kAttemptsOfPass;
}

FailedAttempt Attempts::fail(int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  failed_.push_back(count_);
  return {rank, count_, group_, why};
}

uint64_t Attempts::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

bool Attempts::concerns_this_rank(const FailedAttempt& attempt) const {
  const std::lock_guard lock(mutex_);
  return attempt.group == group_ && attempt.number <= count_ &&
         std::find(failed_.begin(), failed_.end(), attempt.number) == failed_.end();
}

}  // namespace ddp
