// MPI's C interface: its errors as exceptions, and messages of bytes.
#pragma once

// MPI's C++ bindings, which MPI 3 removed, need a library of their own.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ddp::backends::mpi {

/// \param call  "MPI_Isend".
/// \throws c10::DistBackendError  with MPI's text, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// "Open MPI v4.1.4", "MPICH Version: 4.0.2": the first line of what MPI says of itself.
std::string library_version();

/// Messages of bytes that are under way. Longer ones than MPI counts are several messages of one
/// tag, which MPI keeps in order.
///
/// Threads: the MPI thread.
class Transfers {
 public:
  explicit Transfers(MPI_Comm communicator) : communicator_(communicator) {}

  using Start = decltype(&MPI_Isend);

  /// \param start  MPI_Issend: the message is over once it is received, not once it is copied.
  void send(const void* data, size_t bytes, int to, int tag, Start start = &MPI_Isend);
  void receive(void* data, size_t bytes, int from, int tag);
  /// Whether all messages so far have left, and arrived: their memory is free.
  ///
  /// \throws c10::DistBackendError  where another rank sent more or fewer bytes than are received,
  ///         of which MPI takes fewer for a success.
  bool are_over();

 private:
  struct Message {
    int bytes;
    std::optional<int> from;  // of a receive
  };

  void check_sizes(int code) const;

  MPI_Comm communicator_;
  // One each for every message:
  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<Message> messages_;
};

}  // namespace ddp::backends::mpi
