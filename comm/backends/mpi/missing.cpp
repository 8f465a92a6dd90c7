// Describes MPI in programs that are not linked with ddp::mpi, so that the error says how to be.
#include "backends/registry.h"

namespace ddp::backends {

RegisteredBackend describe_mpi() {
  RegisteredBackend mpi;
  mpi.name = "mpi";
  mpi.devices = {"cpu"};
  mpi.capabilities = [] { return BackendCapabilities(); };
  mpi.why_no_build =
      "expected a program that is linked with ddp::mpi, got one without. Add it to "
      "target_link_libraries (ddp must be built with -DDDP_WITH_MPI=ON), or use gloo, under mpirun "
      "too.";
  return mpi;
}

}  // namespace ddp::backends
