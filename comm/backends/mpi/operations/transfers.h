#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/mpi/mpi_calls.h"

namespace ddp::backends::mpi {

/// Messages of bytes that are under way. Longer ones than MPI counts are several messages of one
/// tag, which MPI keeps in order.
///
/// Threads: the MPI thread.
class Transfers {
 public:
  explicit Transfers(MPI_Comm communicator) : communicator_(communicator) {}

  void send(const void* data, size_t bytes, int to, int tag);
  void receive(void* data, size_t bytes, int from, int tag);
  /// Whether all messages so far have left, and arrived: their memory is free.
  bool are_over();

 private:
  MPI_Comm communicator_;
  std::vector<MPI_Request> requests_;
};

}  // namespace ddp::backends::mpi
