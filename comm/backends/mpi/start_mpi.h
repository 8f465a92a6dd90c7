#pragma once

#include "backends/mpi/mpi_thread.h"

namespace ddp::backends::mpi {

/// Checks that a launcher of MPI's has started this process, if any has: MPI would count one rank.
///
/// \throws c10::Error  for ddprun's and torchrun's ranks.
void check_launcher();

/// Whether the program has finalized MPI. Any thread.
bool is_finalized();

/// Checks that MPI is not over. Any thread.
///
/// \throws c10::Error  if the program has finalized it.
void check_not_finalized();

/// Initializes MPI unless the program has. To be called on the MPI thread.
///
/// \param initialized_here  set if this call has.
/// \throws c10::Error  if the program's MPI does not serve several threads, or another MPI than the
///         program's has started the ranks.
World start_mpi(bool& initialized_here);

}  // namespace ddp::backends::mpi
