#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace ddp::backends::mpi {

/// Memory for messages that arrive. It is kept for the next collective: fresh memory costs a page
/// fault for each 4 KiB.
///
/// Threads: the MPI thread.
class ScratchPool {
 public:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t bytes = 0;
  };

  Block take(size_t bytes);
  void give_back(Block block);

 private:
  static constexpr size_t kMostKept = size_t{64} << 20;

  std::vector<Block> free_;
  size_t kept_ = 0;  // bytes in free_
};

}  // namespace ddp::backends::mpi
