// Compiled where LibTorch has its CUDA part and nccl.h was found; no_nccl.cpp elsewhere.
#include <cuda_runtime_api.h>

#include <fstream>
#include <mutex>
#include <set>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/env.h>
#include <ddp/internal/check.h>
#include <ddp/internal/system/host.h>
#include <ddp/internal/text.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "backends/nccl/nccl.h"
#include "base/environment.h"
#include "base/executor.h"

namespace ddp::backends {
namespace {

// The monitor ends collectives at the timeout, and names the ranks that are missing: the watchdog
// is for the case that the monitor's thread cannot.
constexpr std::chrono::seconds kWatchdogGrace{10};

// Sets what makes ProcessGroupNCCL end a process that could report its failure, where the user has
// not set it. Its defaults suit Python's launcher, which restarts processes.
void keep_process_alive() {
  constexpr bool kOverwrite = false;
  // After an error or a timeout: aborts the communicators (2) and does not end the process (3).
  c10::utils::set_env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", kOverwrite);
  // The watchdog sleeps four times as long before it aborts, for dumps of all ranks.
  c10::utils::set_env("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250", kOverwrite);
  // After a dump the group's other thread sleeps for eight minutes, and its destructor waits for
  // it. The library has a flight record of its own.
  c10::utils::set_env("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", kOverwrite);
  // A CUDA error in the watchdog: the program's next call of CUDA throws it as well.
  c10::utils::set_env("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", kOverwrite);
  // A thread ends the process where the watchdog hangs for eight minutes, as in an abort that a
  // kernel holds up. By then the program has caught the error.
  c10::utils::set_env("TORCH_NCCL_ENABLE_MONITORING", "0", kOverwrite);
}

// Options holds an ncclConfig_t, whose size differs between releases of NCCL.
void check_nccl_headers() {
  const auto [major, minor, patch] = c10d::getNcclVersionTuple();
  DDP_CHECK(
      major == NCCL_MAJOR && minor == NCCL_MINOR, "backend nccl: expected NCCL ", NCCL_MAJOR, ".",
      NCCL_MINOR, ", with whose header ddp was built, got the library of NCCL ", major, ".", minor,
      ".", patch, ". Build ddp with the nccl.h of the NCCL that LibTorch loads.");
}

// NCCL keeps the pointer in each communicator, and prints the name as long as one exists.
const char* kept_for_good(const std::string& name) {
  static std::mutex mutex;
  static auto* const names = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return names->insert(name).first->c_str();
}

void write(const NcclOptions& from, ncclConfig_t& to) {
  if (from.min_ctas()) to.minCTAs = *from.min_ctas();
  if (from.max_ctas()) to.maxCTAs = *from.max_ctas();
  // To NCCL a bound that is left out is a number below all others, and the pair no interval.
  if (from.min_ctas() && !from.max_ctas()) to.maxCTAs = kMostCtas;
  if (from.cga_cluster_size()) to.cgaClusterSize = *from.cga_cluster_size();
  if (from.blocking()) to.blocking = *from.blocking() ? 1 : 0;
  if (from.split_share()) to.splitShare = *from.split_share() ? 1 : 0;
  if (from.cta_policy()) to.CTAPolicy = *from.cta_policy();
  if (from.nvls_ctas()) to.nvlsCTAs = *from.nvls_ctas();
  if (from.collnet()) to.collnetEnable = *from.collnet() ? 1 : 0;
  if (from.traffic_class()) to.trafficClass = *from.traffic_class();
  if (!from.comm_name().empty()) to.commName = kept_for_good(from.comm_name());
}

using NcclPtr = c10::intrusive_ptr<c10d::ProcessGroupNCCL>;

// Runs `call`, which no limit of NCCL's bounds, on the device.
template <typename Call>
auto call_in_time(const Setup& setup, const char* ranks, Call call) {
  const auto device = *setup.device_id;
  auto result = bounded_call(
      [device, call = std::move(call)] {
        c10::cuda::set_device(device.index());
        return call(device);
      },
      Deadline::in(setup.connect_by.left()));
  DDP_CHECK_WITH(
      DistBackendError, result, "backend nccl: expected all ranks of ", ranks, setup.group_name,
      " to connect within ", setup.timeout.count(), " ms, got no connection on rank ", setup.rank,
      " of ", setup.world_size,
      ". Look for a rank that ended or hangs, and run with NCCL_DEBUG=INFO.");
  return *result;
}

void connect(const NcclPtr& nccl, const Setup& setup) {
  nccl->setBoundDeviceId(*setup.device_id);
  call_in_time(setup, "", [nccl](c10::Device device) {
    nccl->eagerConnectSingleDevice(device);
    return true;
  });
}

// The communicator to split; null where the group connects anew.
NcclPtr parent_to_split(const Setup& setup) {
  if (!setup.parent || !splits_parent(setup.nccl, setup.device_id)) return {};
  const auto parent = c10::dynamic_intrusive_pointer_cast<c10d::ProcessGroupNCCL>(setup.parent);
  return parent && parent->isInitialized() ? parent : NcclPtr();
}

// \param options  null: of a rank that is in no new group.
BackendPtr split(
    const NcclPtr& parent, const Setup& setup,
    const c10::intrusive_ptr<c10d::ProcessGroupNCCL::Options>& options) {
  const auto ranks = options ? setup.parent_ranks : std::vector<int>{};
  const auto made = call_in_time(
      setup, "the parent of ", [parent, ranks, options, store = setup.store](c10::Device) {
        return parent->split(store, ranks, options);
      });
  if (made) made->setBoundDeviceId(*setup.device_id);
  return made;
}

}  // namespace

// With the host's name and boot id, because two hosts may have the same name. NCCL_HOSTID takes
// their place, as in NCCL: hosts with different values share no GPU.
std::string id_of_gpu(int device) {
  char bus_id[64] = "";
  if (cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device) != cudaSuccess) {
    (void)cudaGetLastError();  // otherwise the next error check would find this one
    return "";
  }
  if (const auto host_id = process_variable("NCCL_HOSTID")) {
    return ddp::str("GPU ", bus_id, " of NCCL_HOSTID ", *host_id);
  }
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return ddp::str("GPU ", bus_id, " of host ", host_name(), " (boot ", boot, ")");
}

std::string why_no_nccl() { return ""; }

bool nccl_is_connected(c10d::Backend& backend) {
  auto* nccl = dynamic_cast<c10d::ProcessGroupNCCL*>(&backend);
  return nccl != nullptr && nccl->isInitialized();
}

// ProcessGroupNCCL's watchdog keeps such a copy, too.
c10::intrusive_ptr<c10d::Work> nccl_without_tensors(c10d::Work& work) {
  using Work = c10d::ProcessGroupNCCL::WorkNCCL;
  const auto* nccl = dynamic_cast<const Work*>(&work);
  if (nccl == nullptr) return {};
  return c10::make_intrusive<Work>(*nccl);
}

BackendPtr make_nccl(const Setup& setup) {
  check_nccl_headers();
  keep_process_alive();
  auto options = c10d::ProcessGroupNCCL::Options::create(setup.nccl.is_high_priority_stream());
  write(setup.nccl, options->config);
  options->timeout = setup.timeout + kWatchdogGrace;
  options->group_name = setup.group_name;
  options->global_ranks_in_group = setup.global_ranks;
  if (const auto parent = parent_to_split(setup)) return split(parent, setup, options);
  auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      setup.store, setup.rank, setup.world_size, std::move(options));
  if (setup.device_id) connect(nccl, setup);
  return nccl;
}

void sit_out_nccl(const Setup& setup) {
  if (const auto parent = parent_to_split(setup)) split(parent, setup, nullptr);
}

}  // namespace ddp::backends
