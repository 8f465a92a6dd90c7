#include "sharded/block_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/internal/check.h>
#include <ddp/internal/parameter_memory.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/tensor_memory.h>

namespace ddp {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  void* memory;
  size_t bytes;
};

struct FreeBlocks {
  std::mutex mutex;
  std::vector<Block> blocks;
};

// Never destroyed: tensors of static storage may free theirs at exit.
FreeBlocks& free_blocks() {
  static auto* blocks = new FreeBlocks;
  return *blocks;
}

void keep_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  auto& pool = free_blocks();
  const std::lock_guard lock(pool.mutex);
  pool.blocks.push_back(*block);
}

void return_block(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  ::munmap(block->memory, block->bytes);
}

/// \return  whether one of this size waited.
bool take_free_block(size_t bytes, Block& block) {
  auto& pool = free_blocks();
  const std::lock_guard lock(pool.mutex);
  const auto found = find_if(pool.blocks, [&](const Block& b) { return b.bytes == bytes; });
  if (found == pool.blocks.end()) return false;
  block = *found;
  pool.blocks.erase(found);
  return true;
}

size_t in_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return std::max((bytes + page - 1) / page, size_t{1}) * page;
}

/// Maps new memory. What fills a huge page begins where one can be, so that the kernel may take it:
/// then one page fault takes the place of 512.
Block map_block(size_t bytes) {
  const size_t spare = bytes >= kHugePage ? kHugePage : 0;
  void* const mapped =
      ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  DDP_CHECK(
      mapped != MAP_FAILED, "FullyShardedDataParallel: expected ", bytes,
      " bytes for the parameters of a unit, but the kernel has none. Make smaller units.");
  if (spare == 0) return {mapped, bytes};
  const auto past = reinterpret_cast<uintptr_t>(mapped) % kHugePage;
  const size_t before = past == 0 ? 0 : kHugePage - past;
  auto* const memory = static_cast<std::byte*>(mapped) + before;
  if (before > 0) ::munmap(mapped, before);
  if (spare > before) ::munmap(memory + bytes, spare - before);
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  return {memory, bytes};
}

}  // namespace

c10::DataPtr allocate_block(size_t bytes, OnFree on_free) {
  bytes = in_pages(bytes);
  const auto free = on_free == OnFree::kReuse ? &keep_block : &return_block;
  Block block{};
  if (on_free == OnFree::kReturn || !take_free_block(bytes, block)) {
    if (on_free == OnFree::kReuse) trim_blocks();
    block = map_block(bytes);
  }
  return counted_memory(
      {block.memory, new Block(block), free, c10::kCPU}, bytes, MemoryKind::Gathered);
}

at::Tensor empty_block(int64_t numel, const at::TensorOptions& options, OnFree on_free) {
  if (!options.device().is_cpu()) return at::empty({numel}, options);
  auto tensor = at::empty({0}, options);
  const auto bytes = static_cast<size_t>(numel) * tensor.element_size();
  refill_memory(tensor, allocate_block(bytes, on_free), bytes);
  return tensor.set_(tensor.storage(), 0, {numel});
}

void trim_blocks() {
  std::vector<Block> unused;
  {
    auto& pool = free_blocks();
    const std::lock_guard lock(pool.mutex);
    unused.swap(pool.blocks);
  }
  for (const auto& block : unused) ::munmap(block.memory, block.bytes);
}

}  // namespace ddp
