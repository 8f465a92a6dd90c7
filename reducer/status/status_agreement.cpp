#include "status/status_agreement.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <ddp/internal/current_stream.h>

namespace ddp {
namespace {

// Two counts that agree modulo both differ by a multiple of 20.
constexpr int64_t kModuli[] = {4, 5};
constexpr int64_t kFirstCount = 2;
constexpr int64_t kFirstTime = kFirstCount + kModuli[0] + kModuli[1];
// A status in float16 holds no larger times; in ms.
constexpr double kMostTime = 60000;

// The number of elements before the flags of usage. One rank compares its times with no other.
int64_t first_flag(int ranks) {
  return kFirstTime + (ranks > 1 ? static_cast<int64_t>(kTimesOfRank) * ranks : 0);
}

TimesOfRanks read_times(const double* words, int ranks) {
  TimesOfRanks times;
  for (int rank = 0; rank < ranks && ranks > 1; ++rank, words += kTimesOfRank) {
    times.push_back({words[0], words[1], words[2]});
    if (!(times.back().sum() > 0)) return {};
  }
  return times;
}

}  // namespace

StatusAgreement::Staging::Staging(const at::Tensor& status)
    : memory(at::empty(
          status.sizes(), at::dtype(status.scalar_type()).device(at::kCPU).pinned_memory(true))),
      arrived(status.device().type()) {}

bool StatusAgreement::Staging::can_take(const at::Tensor& status) const {
  const bool fits = memory.sizes() == status.sizes() && memory.dtype() == status.dtype() &&
                    arrived.device_type() == status.device().type();
  const bool is_of_device =
      !arrived.was_marked_for_recording() || arrived.device_index() == status.device().index();
  return fits && is_of_device && is_fetched && arrived.query();
}

// Another one takes the place of memory whose sum nobody fetched, as after an error, or read.
StatusAgreement::Staging& StatusAgreement::next_staging() {
  turn_ = 1 - turn_;
  auto& staging = staging_[turn_];
  if (!staging || staging.use_count() > 1 || !staging->can_take(storage_)) {
    staging = std::make_shared<Staging>(storage_);
  }
  staging->is_fetched = false;
  return *staging;
}

StatusAgreement::StatusAgreement(int rank, int ranks, size_t tracked, bool defers)
    : rank_(rank),
      ranks_(ranks),
      tracked_(tracked),
      defers_(defers),
      head_(static_cast<size_t>(first_flag(ranks))) {}

int64_t StatusAgreement::size(int ranks, size_t tracked) {
  return first_flag(ranks) + static_cast<int64_t>(tracked);
}

void StatusAgreement::report(Problem problem) {
  const std::lock_guard lock(mutex_);
  add_problem(reported_, std::move(problem));
}

void StatusAgreement::use_bucket_tail(at::Tensor tail) {
  uses_own_collective_ = false;
  storage_ = std::move(tail);
}

void StatusAgreement::use_host_memory() {
  uses_own_collective_ = false;
  storage_ = at::zeros({size()}, at::kFloat);
}

void StatusAgreement::use_own_collective(c10::Device device) {
  uses_own_collective_ = true;
  storage_ = at::zeros({size()}, at::dtype(at::kFloat).device(device));
}

c10::intrusive_ptr<c10d::Work> StatusAgreement::send(c10d::ProcessGroup& group) const {
  if (group.getSize() == 1) return {};
  std::vector<at::Tensor> wire{storage_};
  return group.allreduce(wire);
}

std::vector<Problem> StatusAgreement::take_reported() {
  const std::lock_guard lock(mutex_);
  return std::exchange(reported_, {});
}

std::vector<Problem> StatusAgreement::write_zeros() {
  storage_.zero_();
  return take_reported();
}

std::vector<Problem> StatusAgreement::write(
    const std::optional<uint64_t>& forwards, const std::vector<char>& used, bool asks,
    const RankTimes& times) {
  auto problems = take_reported();
  std::fill(head_.begin(), head_.end(), 0.0F);
  head_[0] = problems.empty() ? 0 : 1;
  head_[1] = asks ? 1 : 0;
  size_t first = kFirstCount;
  for (const auto modulus : kModuli) {
    if (forwards) head_[first + *forwards % modulus] = 1;
    first += modulus;
  }
  if (ranks_ > 1) {
    auto* own = &head_[kFirstTime + kTimesOfRank * static_cast<size_t>(rank_)];
    for (const double time : {times.data, times.forward, times.backward}) {
      *own++ = static_cast<float>(std::min(time, kMostTime));
    }
  }
  const bool on_cpu = storage_.is_cpu();
  const auto host = on_cpu ? storage_ : next_staging().memory;
  const auto head = first_flag(ranks_);
  host.narrow(0, 0, head).copy_(at::from_blob(head_.data(), {head}, at::kFloat));
  if (tracked_ > 0) {
    auto* flags = const_cast<char*>(used.data());  // from_blob takes no const; it is only read
    const auto count = static_cast<int64_t>(tracked_);
    host.narrow(0, head, count).copy_(at::from_blob(flags, {count}, at::kChar));
  }
  if (!on_cpu) storage_.copy_(host, /*non_blocking=*/true);
  return problems;
}

StatusAgreement::PendingSum StatusAgreement::fetch() {
  if (storage_.is_cpu()) {
    return {storage_.to(at::kDouble, false, /*copy=*/true), ranks_};
  }
  const auto& staging = staging_[turn_];
  staging->memory.copy_(storage_, /*non_blocking=*/true);
  staging->arrived.record(current_stream_of(storage_.device()));
  staging->is_fetched = true;
  return {staging->memory, ranks_, staging};
}

StatusAgreement::Sum StatusAgreement::PendingSum::read() const {
  // After is_ready() returned true there is nothing to wait for.
  if (!is_ready()) staging_->arrived.synchronize();
  const auto host = host_.to(at::kDouble);
  const auto* words = host.const_data_ptr<double>();
  Sum sum;
  sum.problems = words[0] > 0;
  sum.asks = words[1] > 0;
  const auto* word = words + kFirstCount;
  for (const auto modulus : kModuli) {
    const auto different = std::count_if(word, word + modulus, [](double w) { return w > 0; });
    sum.same_forwards = sum.same_forwards && different <= 1;
    word += modulus;
  }
  sum.times = read_times(words + kFirstTime, ranks_);
  const auto flags = first_flag(ranks_);
  sum.unused.reserve(static_cast<size_t>(host.numel() - flags));
  for (int64_t i = flags; i < host.numel(); ++i) sum.unused.push_back(words[i] == 0);
  return sum;
}

}  // namespace ddp
