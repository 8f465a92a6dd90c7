#include "status_board.h"

#include <algorithm>
#include <array>

#include <ATen/ops/from_blob.h>

namespace ddp {
namespace {

// Counts that agree modulo both agree, or are 20 apart.
constexpr int64_t kModuli[] = {4, 5};
constexpr int64_t kFirstFlag = 1 + kModuli[0] + kModuli[1];

}  // namespace

int64_t StatusBoard::size() const {
  return kFirstFlag + (tracks_usage_ ? static_cast<int64_t>(parameters_) : 0);
}

void StatusBoard::write(
    size_t problems, const std::optional<uint64_t>& forwards, const std::vector<char>& used) {
  std::array<float, kFirstFlag> head{};
  head[0] = problems > 0 ? 1 : 0;
  size_t first = 1;
  for (const auto modulus : kModuli) {
    if (forwards) head[first + *forwards % modulus] = 1;
    first += modulus;
  }
  storage_.narrow(0, 0, kFirstFlag).copy_(at::from_blob(head.data(), {kFirstFlag}, at::kFloat));
  if (!tracks_usage_) return;
  auto* flags = const_cast<char*>(used.data());  // from_blob takes no const; it is only read
  const auto count = static_cast<int64_t>(parameters_);
  storage_.narrow(0, kFirstFlag, count).copy_(at::from_blob(flags, {count}, at::kChar));
}

StatusBoard::Sum StatusBoard::read() const {
  const auto host = storage_.to(at::kCPU, at::kDouble);
  const auto* words = host.const_data_ptr<double>();
  Sum sum;
  sum.problems = words[0] > 0;
  const auto* word = words + 1;
  for (const auto modulus : kModuli) {
    const auto different = std::count_if(word, word + modulus, [](double w) { return w > 0; });
    sum.same_forwards = sum.same_forwards && different <= 1;
    word += modulus;
  }
  if (!tracks_usage_) return sum;
  sum.unused.reserve(parameters_);
  for (size_t i = 0; i < parameters_; ++i) sum.unused.push_back(words[kFirstFlag + i] == 0);
  return sum;
}

}  // namespace ddp
