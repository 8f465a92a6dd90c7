// The description of NCCL, which is the same whether it is built in or not.
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
    capabilities.averages = true;
    capabilities.reduces_in_own_memory = registers_memory();
    capabilities.waits_on_stream = true;
    capabilities.reports_results = has_watchdog();
    capabilities.reduces_sparse = false;
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
