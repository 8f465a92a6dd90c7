#include "sharded/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/parameter_memory.h>

namespace ddp {
namespace {

struct Block {
  void* memory;
  size_t bytes;
  int64_t freed_in = 0;  // the number of the pass
};

/// Blocks that are freed and not unmapped.
struct FreeBlocks {
  std::mutex mutex;
  std::vector<Block> blocks;
  int64_t pass = 0;
};

// Never destroyed: tensors of static storage may free theirs at exit.
FreeBlocks& free_blocks() {
  static auto* blocks = new FreeBlocks;
  return *blocks;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& pool = free_blocks();
  const std::lock_guard lock(pool.mutex);
  block->freed_in = pool.pass;
  pool.blocks.push_back(*block);
  delete block;
}

c10::DataPtr pointer_to(const Block& block) {
  return {block.memory, new Block(block), &free_block, c10::kCPU};
}

void unmap(const std::vector<Block>& blocks) {
  for (const auto& block : blocks) ::munmap(block.memory, block.bytes);
}

/// Takes the blocks that were freed before this pass.
std::vector<Block> take_old(FreeBlocks& pool) {
  auto& blocks = pool.blocks;
  const auto old = std::stable_partition(blocks.begin(), blocks.end(), [&](const Block& block) {
    return block.freed_in == pool.pass;
  });
  std::vector<Block> taken(old, blocks.end());
  blocks.erase(old, blocks.end());
  return taken;
}

}  // namespace

c10::DataPtr allocate_block(size_t bytes) {
  constexpr size_t kPage = 4096;
  bytes = std::max((bytes + kPage - 1) / kPage, size_t{1}) * kPage;
  auto& pool = free_blocks();
  std::vector<Block> unused;
  {
    const std::lock_guard lock(pool.mutex);
    const auto fits = std::find_if(pool.blocks.begin(), pool.blocks.end(), [&](const Block& block) {
      return block.bytes == bytes;
    });
    if (fits != pool.blocks.end()) {
      const auto block = *fits;
      pool.blocks.erase(fits);
      return pointer_to(block);
    }
    unused = take_old(pool);
  }
  unmap(unused);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  DDP_CHECK(
      memory != MAP_FAILED, "FullyShardedDataParallel: expected ", bytes,
      " bytes for the parameters of a unit, but the kernel has none. Make smaller units.");
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // where the kernel can: fewer page faults
  return pointer_to({memory, bytes});
}

at::Tensor empty_block(int64_t numel, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty({numel}, options);
  auto tensor = at::empty({0}, options);
  const auto bytes = static_cast<size_t>(numel) * tensor.element_size();
  refill_memory(tensor, allocate_block(bytes), bytes);
  return tensor.set_(tensor.storage(), 0, {numel});
}

void begin_pass_over_blocks() {
  auto& pool = free_blocks();
  const std::lock_guard lock(pool.mutex);
  ++pool.pass;
}

void trim_blocks() {
  std::vector<Block> unused;
  {
    auto& pool = free_blocks();
    const std::lock_guard lock(pool.mutex);
    unused.swap(pool.blocks);
  }
  unmap(unused);
}

}  // namespace ddp
