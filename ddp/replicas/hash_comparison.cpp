#include "replicas/hash_comparison.h"

#include <utility>
#include <vector>

#include <ATen/ops/tensor.h>
#include <ddp/internal/text.h>

namespace ddp {

void HashComparison::start(uint64_t hash, c10::Device device, c10d::ProcessGroup& group) {
  const auto number = static_cast<int64_t>(hash);
  // One all-reduce of the maximum finds both extremes: max(~hash) is ~min(hash).
  extremes_ = at::tensor({number, ~number}).to(device);
  std::vector<at::Tensor> wire{extremes_};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  work_ = group.allreduce(wire, options);
}

std::optional<bool> HashComparison::finish(const char* subject, GroupMonitor& monitor) {
  const auto work = std::exchange(work_, {});
  if (!work) return std::nullopt;
  const auto where = [&] { return ddp::str("comparing a hash of the ranks' ", subject); };
  monitor.abort_on_error(where, [&] { monitor.wait(*work, where); });
  const auto extremes = extremes_.cpu();
  const auto* of_all = extremes.const_data_ptr<int64_t>();
  return of_all[0] == ~of_all[1];
}

}  // namespace ddp
