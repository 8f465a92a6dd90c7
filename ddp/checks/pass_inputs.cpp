#include "checks/pass_inputs.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ddp/internal/current_stream.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/pretended.h>
#include <ddp/internal/ranges.h>

#include "replicas/replica_check.h"

namespace ddp {
namespace {

at::Tensor some_rows_of(const at::Tensor& tensor) {
  constexpr int64_t kRows = 8;
  const auto rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  return rows == 0 ? tensor : tensor.slice(0, 0, rows, std::max<int64_t>(1, rows / kRows));
}

// Elements all over the tensor: the beginning may be padding.
at::Tensor sample_of(const at::Tensor& tensor) {
  constexpr int64_t kElements = 4096;
  auto part = tensor.detach();
  if (!part.is_contiguous()) part = some_rows_of(part);  // reshape() copies
  const auto flat = part.reshape({-1});
  return flat.slice(0, 0, flat.numel(), std::max<int64_t>(1, flat.numel() / kElements));
}

bool has_plain_values(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_nested() && tensor.layout() == at::kStrided &&
         tensor.numel() > 0 && !tensor.is_quantized() && !tensor.is_meta() &&
         !is_capturing(tensor.device());
}

}  // namespace

void PassInputs::restart() {
  passes_ = 0;
  hashes_.clear();
  comparison_.drop();
}

void PassInputs::note(const std::vector<at::Tensor>& inputs) try {
  std::vector<at::Tensor> samples;
  for (const auto& input : inputs) {
    if (has_plain_values(input)) samples.push_back(sample_of(input));
  }
  if (!samples.empty()) hashes_.push_back(hash_of(samples));
} catch (const std::exception&) {
  // A kind of tensor that cannot be read tells nothing, and is no reason to stop.
}

uint64_t PassInputs::digest(int rank) const {
  const bool tells = any_of(hashes_, [&](uint64_t hash) { return hash != hashes_.front(); });
  // No other rank's.
  if (!tells) return static_cast<uint64_t>(rank);
  return hash_of_bytes(hashes_.data(), hashes_.size() * sizeof(uint64_t));
}

void PassInputs::start(c10d::ProcessGroup& group, c10::Device device) {
  if (!enabled_ || group.getSize() == 1 || passes_ >= kPasses || ++passes_ < kPasses) return;
  if (is_capturing(device)) return;
  comparison_.start(digest(group.getRank()), device, group);
  hashes_ = {};
}

void PassInputs::finish(GroupMonitor& monitor, c10d::ProcessGroup& group) {
  const bool are_same = comparison_.finish("inputs", monitor).value_or(false);
  // A pretended rank sees its own inputs in the place of the others'.
  if (!are_same || group.getRank() != 0 || is_pretended() || std::exchange(has_warned_, true))
    return;
  TORCH_WARN(
      "DistributedDataParallel: expected each rank to have samples of its own, got the same inputs "
      "on all ",
      group.getSize(), " ranks in the first ", kPasses,
      " averaged passes: each rank repeats the others' work. Give the loader a "
      "ddp::DistributedSampler, or draw after ddp::seed_all(). If it is meant, "
      "check_inputs(false).");
}

}  // namespace ddp
