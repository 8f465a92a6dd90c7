// The description of NCCL, and its options, which are the same whether it is built in or not.
#include <ddp/internal/check.h>
#include <ddp/internal/light_work.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "base/environment.h"

#include "backends/nccl/nccl.h"
#include "backends/registry.h"

namespace ddp::backends {
namespace {

// As in PyTorch, NCCL reduces in memory that it registers only if DDP_DISABLE_COMM_MEM is set, and
// not to 1. NCCL requires the buffers of all ranks to have the same offsets in the registered
// memory, which a memory pool does not guarantee. Allocation needs a communicator, and so a
// collective before it. Source: NCCL's guide, "User Buffer Registration".
bool registers_memory() { return process_variable("DDP_DISABLE_COMM_MEM").value_or("1") != "1"; }

// ProcessGroupNCCL has no watchdog where each of its waits blocks the host.
bool has_watchdog() {
  for (const auto* name : {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}) {
    if (process_variable(name).value_or("0") == "1") return false;
  }
  return true;
}

// The dtypes and operations that ProcessGroupNCCL accepts. float8 is left out, because NCCL reduces
// it on some GPUs only.
const ReductionTable& reductions_of_nccl() {
  using Op = c10d::ReduceOp;
  static const ReductionTable table{
      {{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16},
       {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::PREMUL_SUM}},
      {{at::kChar, at::kByte, at::kInt, at::kLong}, {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX}}};
  return table;
}

}  // namespace

RegisteredBackend describe_nccl() {
  RegisteredBackend nccl;
  nccl.name = "nccl";
  nccl.devices = {"cuda"};
  nccl.is_default = true;
  nccl.capabilities = [] {
    BackendCapabilities capabilities;
    // To NCCL an average is a sum of products (ncclDevPreMulSum). NVLS, its kernels for symmetric
    // memory and its registration of buffers serve plain sums only. Source: NCCL 2.28.9, device.h
    // (ncclNvlsSupported) and coll_reg.cc.
    capabilities.averages = false;
    capabilities.reduces_in_own_memory = registers_memory();
    capabilities.waits_on_stream = true;
    capabilities.reports_results = has_watchdog();
    capabilities.reduces_sparse = false;
    capabilities.receives_from_any = false;
    capabilities.reductions = &reductions_of_nccl();
    return capabilities;
  };
  nccl.make = make_nccl;
  nccl.participate_as_non_member = sit_out_nccl;
  nccl.connects_late = true;
  nccl.is_connected = nccl_is_connected;
  nccl.claim = [] { return std::string(registers_memory() ? "DDP_DISABLE_COMM_MEM=0" : ""); };
  nccl.picks_device = true;
  nccl.why_unusable = why_no_nccl();
  nccl.device_id = id_of_gpu;
  return nccl;
}

}  // namespace ddp::backends

namespace ddp {
namespace {

void check_within(const char* name, const std::optional<int>& value, int least, int most) {
  DDP_CHECK_VALUE(
      !value || (*value >= least && *value <= most), "NcclOptions: expected ", name, " from ",
      least, " to ", most, ", got ", value.value_or(0), ". Leave it out, and NCCL chooses.");
}

// As NCCL's logs, and the tools that read them, can show it in one line.
void check_name(const std::string& name) {
  constexpr size_t kLongest = 64;
  const bool is_plain = all_of(name, [](char c) { return c >= ' ' && c <= '~'; });
  DDP_CHECK_VALUE(
      is_plain && name.size() <= kLongest, "NcclOptions: expected a comm_name of at most ",
      kLongest, " printable characters of ASCII, got ", name.size(), " bytes",
      is_plain ? "" : " with others among them", ". Choose another.");
}

}  // namespace

void check_nccl_options(const NcclOptions& options) {
  check_within("min_ctas", options.min_ctas(), 1, kMostCtas);
  check_within("max_ctas", options.max_ctas(), 1, kMostCtas);
  check_within("cga_cluster_size", options.cga_cluster_size(), 0, 8);
  check_within("cta_policy", options.cta_policy(), 0, 2);
  check_within("nvls_ctas", options.nvls_ctas(), 1, kMostCtas);
  check_within("traffic_class", options.traffic_class(), 0, 255);
  check_name(options.comm_name());
  DDP_CHECK_VALUE(
      !options.min_ctas() || !options.max_ctas() || *options.min_ctas() <= *options.max_ctas(),
      "NcclOptions: expected min_ctas of at most max_ctas, got ", options.min_ctas().value_or(0),
      " and ", options.max_ctas().value_or(0), ". Give bounds that leave a number between them.");
}

std::string nccl_claim(const NcclOptions& options) {
  std::string claim;
  const auto add = [&](const char* name, const auto& value) {
    if (value) claim += ddp::str(claim.empty() ? "NcclOptions of " : " and ", name, ' ', *value);
  };
  add("cta_policy", options.cta_policy());
  add("nvls_ctas", options.nvls_ctas());
  add("collnet", options.collnet());
  return claim;
}

bool splits_parent(const NcclOptions& options, const std::optional<c10::Device>& device_id) {
  return device_id && options.split_share();
}

c10::intrusive_ptr<c10d::Work> without_tensors(const c10::intrusive_ptr<c10d::Work>& work) {
  if (auto* keeps = dynamic_cast<KeepsTensors*>(work.get())) return keeps->without_tensors();
  auto light = backends::nccl_without_tensors(*work);
  return light ? light : work;
}

}  // namespace ddp
