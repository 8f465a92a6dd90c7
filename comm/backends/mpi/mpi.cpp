// Describes MPI, although no build has it, so that its error can name the alternatives.
#include "backends/registry.h"

namespace ddp::backends {

BackendDescription describe_mpi() {
  BackendDescription mpi;
  mpi.name = "mpi";
  mpi.devices = {"cpu", "cuda"};
  mpi.capabilities = [] { return BackendCapabilities(); };
  mpi.why_no_build = "LibTorch's binaries come without it. Use gloo or nccl, under mpirun too.";
  return mpi;
}

}  // namespace ddp::backends
