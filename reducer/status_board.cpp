#include "status_board.h"

#include <array>

#include <ATen/ops/from_blob.h>

namespace ddp {
namespace {

constexpr int64_t kForwardCounts = 4;
constexpr int64_t kFirstFlag = 1 + kForwardCounts;

}  // namespace

int64_t StatusBoard::size() const {
  return kFirstFlag + (tracks_usage_ ? static_cast<int64_t>(parameters_) : 0);
}

void StatusBoard::write(size_t problems, uint64_t forwards, const std::vector<char>& used) {
  std::array<float, kFirstFlag> head{};
  head[0] = problems > 0 ? 1 : 0;
  head[1 + forwards % kForwardCounts] = 1;
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
  int64_t different = 0;
  for (int64_t i = 1; i < kFirstFlag; ++i) different += words[i] > 0 ? 1 : 0;
  sum.same_forwards = different == 1;
  if (!tracks_usage_) return sum;
  for (size_t i = 0; i < parameters_; ++i) sum.unused.push_back(words[kFirstFlag + i] == 0);
  return sum;
}

}  // namespace ddp
