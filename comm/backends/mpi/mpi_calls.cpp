#include "backends/mpi/mpi_calls.h"

#include <algorithm>

#include <ddp/internal/check.h>

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

void Transfers::send(const void* data, size_t bytes, int to, int tag, Start start) {
  in_messages(bytes, [&](size_t offset, int count) {
    messages_.push_back({count, std::nullopt});
    check_mpi(
        start(
            static_cast<const char*>(data) + offset, count, MPI_BYTE, to, tag, communicator_,
            &requests_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Isend");
  });
}

void Transfers::receive(void* data, size_t bytes, int from, int tag) {
  in_messages(bytes, [&](size_t offset, int count) {
    messages_.push_back({count, from});
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
  statuses_.resize(requests_.size());
  const int code =
      MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &over, statuses_.data());
  if (code == MPI_ERR_IN_STATUS || over != 0) check_sizes(code);
  check_mpi(code, "MPI_Testall");
  if (over != 0) {
    requests_.clear();
    messages_.clear();
  }
  return over != 0;
}

void Transfers::check_sizes(int code) const {
  for (size_t i = 0; i < messages_.size(); ++i) {
    const auto& [bytes, from] = messages_[i];
    const auto& status = statuses_[i];
    // MPI sets errors only where it says so.
    const bool has_failed = code == MPI_ERR_IN_STATUS && status.MPI_ERROR != MPI_SUCCESS;
    const bool is_longer = has_failed && status.MPI_ERROR == MPI_ERR_TRUNCATE;
    if (!from || (has_failed && !is_longer)) continue;
    int got = 0;
    if (!is_longer) check_mpi(MPI_Get_count(&status, MPI_BYTE, &got), "MPI_Get_count");
    DDP_CHECK_WITH(
        DistBackendError, !is_longer && got == bytes, "all_to_all: expected ", bytes,
        " bytes of rank ", *from, ", got ", is_longer ? "more" : std::to_string(got),
        ". Let the output splits on each rank be the other ranks' input splits for it");
  }
}

}  // namespace ddp::backends::mpi
