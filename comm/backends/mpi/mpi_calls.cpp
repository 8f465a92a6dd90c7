#include "backends/mpi/mpi_calls.h"

#include <algorithm>

#include <ddp/internal/check.h>

namespace ddp::backends::mpi {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  DDP_CHECK_WITH(
      DistBackendError, false, call, " failed: ", std::string(text, static_cast<size_t>(length)),
      " (error ", code, ")");
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  check_mpi(MPI_Get_library_version(text, &length), "MPI_Get_library_version");
  std::string version(text, static_cast<size_t>(length));
  version.resize(std::min(version.find_first_of("\n,"), version.size()));
  for (auto& letter : version) {
    if (letter == '\t') letter = ' ';
  }
  return version;
}

}  // namespace ddp::backends::mpi
