// MPI's C interface, and its errors as exceptions.
#pragma once

// MPI's C++ bindings, which MPI 3 removed, need a library of their own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <cstddef>
#include <string>

namespace ddp::backends::mpi {

/// \param call  "MPI_Isend".
/// \throws c10::DistBackendError  with MPI's text, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// "Open MPI v4.1.4", "MPICH Version: 4.0.2": the first line of what MPI says of itself.
std::string library_version();

}  // namespace ddp::backends::mpi
