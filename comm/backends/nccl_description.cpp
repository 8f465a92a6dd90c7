// What holds for NCCL whether it is built in or not.
#include "environment.h"

#include "backends/nccl.h"
#include "backends/registry.h"

namespace ddp::backends {
namespace {

// NCCL reduces in memory that it registers only where DDP_DISABLE_COMM_MEM is set, and not to 1, as
// in PyTorch. NCCL wants the buffers of all ranks at the same offsets into what they registered,
// and a memory pool does not promise that. Allocation needs a communicator, that is an earlier
// collective. Source: NCCL's guide, "User Buffer Registration".
bool registers_memory() { return process_variable("DDP_DISABLE_COMM_MEM").value_or("1") != "1"; }

// What ProcessGroupNCCL takes of both. float8 is left out: NCCL reduces it on some GPUs alone.
const ReductionTable& reductions_of_nccl() {
  using Op = c10d::ReduceOp;
  static const ReductionTable table{
      {{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16},
       {Op::SUM, Op::AVG, Op::PRODUCT, Op::MIN, Op::MAX, Op::PREMUL_SUM}},
      {{at::kChar, at::kByte, at::kInt, at::kLong}, {Op::SUM, Op::PRODUCT, Op::MIN, Op::MAX}}};
  return table;
}

}  // namespace

Description describe_nccl() {
  Description nccl;
  nccl.name = "nccl";
  nccl.devices = {"cuda"};
  nccl.is_default = true;
  nccl.capabilities = [] {
    BackendCapabilities capabilities;
    capabilities.averages = true;
    capabilities.reduces_in_own_memory = registers_memory();
    capabilities.waits_on_stream = true;
    capabilities.reductions = &reductions_of_nccl();
    return capabilities;
  };
  nccl.make = make_nccl;
  nccl.find_gpu = find_gpu;
  nccl.use_gpu = use_cuda_device;
  return nccl;
}

}  // namespace ddp::backends
