#include "backends/mpi/operations/scratch.h"

#include <algorithm>
#include <utility>

namespace ddp::backends::mpi {

ScratchPool::Block ScratchPool::take(size_t bytes) {
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->bytes < bytes || (best != free_.end() && best->bytes <= block->bytes)) continue;
    best = block;
  }
  if (best == free_.end()) return {std::unique_ptr<std::byte[]>(new std::byte[bytes]), bytes};
  auto block = std::move(*best);
  free_.erase(best);
  kept_ -= block.bytes;
  return block;
}

void ScratchPool::give_back(Block block) {
  if (block.bytes == 0 || kept_ + block.bytes > kMostKept) return;
  kept_ += block.bytes;
  free_.push_back(std::move(block));
}

}  // namespace ddp::backends::mpi
