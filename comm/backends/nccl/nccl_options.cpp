#include "backends/nccl/nccl_options.h"

#include <ddp/internal/check.h>

namespace ddp {
namespace {

constexpr int kMostCtas = 64;  // NCCL 2.28's number of channels

void check_within(const char* name, const std::optional<int>& value, int least, int most) {
  DDP_CHECK_VALUE(
      !value || (*value >= least && *value <= most), "NcclOptions: expected ", name, " from ",
      least, " to ", most, ", got ", value.value_or(0), ". Leave it out, and NCCL chooses.");
}

}  // namespace

void check_nccl_options(const NcclOptions& options) {
  check_within("min_ctas", options.min_ctas(), 1, kMostCtas);
  check_within("max_ctas", options.max_ctas(), 1, kMostCtas);
  check_within("cga_cluster_size", options.cga_cluster_size(), 0, 8);
  DDP_CHECK_VALUE(
      !options.min_ctas() || !options.max_ctas() || *options.min_ctas() <= *options.max_ctas(),
      "NcclOptions: expected min_ctas of at most max_ctas, got ", options.min_ctas().value_or(0),
      " and ", options.max_ctas().value_or(0), ". Give bounds that leave a number between them.");
}

bool splits_parent(const NcclOptions& options, const std::optional<c10::Device>& device_id) {
  return device_id && options.split_share();
}

}  // namespace ddp
