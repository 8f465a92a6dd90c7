#include "backends/mpi/operations/transfers.h"

#include <algorithm>

namespace ddp::backends::mpi {
namespace {

constexpr size_t kLargest = size_t{1} << 30;  // MPI counts by int

/// Calls `post(offset, count)` for each message; once for no bytes.
template <typename Post>
void in_messages(size_t bytes, const Post& post) {
  size_t offset = 0;
  do {
    const auto count = std::min(bytes - offset, kLargest);
    post(offset, static_cast<int>(count));
    offset += count;
  } while (offset < bytes);
}

}  // namespace

void Transfers::send(const void* data, size_t bytes, int to, int tag) {
  in_messages(bytes, [&](size_t offset, int count) {
    check_mpi(
        MPI_Isend(
            static_cast<const char*>(data) + offset, count, MPI_BYTE, to, tag, communicator_,
            &requests_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Isend");
  });
}

void Transfers::receive(void* data, size_t bytes, int from, int tag) {
  in_messages(bytes, [&](size_t offset, int count) {
    check_mpi(
        MPI_Irecv(
            static_cast<char*>(data) + offset, count, MPI_BYTE, from, tag, communicator_,
            &requests_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Irecv");
  });
}

bool Transfers::are_over() {
  if (requests_.empty()) return true;
  int over = 0;
  check_mpi(
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &over, MPI_STATUSES_IGNORE),
      "MPI_Testall");
  if (over != 0) requests_.clear();
  return over != 0;
}

}  // namespace ddp::backends::mpi
