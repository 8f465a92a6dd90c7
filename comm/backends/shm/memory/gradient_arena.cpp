#include "gradient_arena.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <ddp/internal/owner_process.h>

#include "segment.h"

namespace ddp::backends::shm {
namespace {

/// The arena, and the sizes, that a thread's allocations may come from.
struct Service {
  std::shared_ptr<Arena> arena;
  std::vector<size_t> sizes;  // in ascending order
  OwnerProcess owner;
};

/// The services of one thread, the latest last; those that have ended are expired.
class Services {
 public:
  /// Null before the thread's first service, and after the thread's Services are destroyed:
  /// destructors of static objects may still allocate tensors then.
  static Services* of_this_thread() { return of_this_thread_; }
  static Services& make_for_this_thread() {
    thread_local Services services;
    of_this_thread_ = &services;
    return services;
  }
  ~Services() { of_this_thread_ = nullptr; }

  std::vector<std::weak_ptr<const Service>> list;

 private:
  static thread_local Services* of_this_thread_;
};
thread_local Services* Services::of_this_thread_ = nullptr;

/// The blocks of all arenas that tensors use, by address. Never destroyed: tensors may outlive it.
class Blocks {
 public:
  static Blocks& instance() {
    static auto* blocks = make();
    return *blocks;
  }

  void add(void* block, std::shared_ptr<Arena> arena, size_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_[block] = {std::move(arena), bytes, {}};
  }

  /// \return whether `block` was one of these.
  bool release(void* block) {
    Block found;
    {
      const std::lock_guard lock(mutex_);
      const auto at = blocks_.find(block);
      if (at == blocks_.end()) return false;
      found = std::move(at->second);
      blocks_.erase(at);
    }
    // In a forked process another thread's lock on the arena may never be released.
    if (found.owner.is_this_one()) {
      found.arena->release(static_cast<std::byte*>(block), found.bytes, Arena::OnRelease::kKeep);
    }
    return true;
  }

 private:
  struct Block {
    std::shared_ptr<Arena> arena;
    size_t bytes = 0;
    OwnerProcess owner;
  };

  // No process is forked while a thread holds the lock: the forked process could free no tensor.
  static Blocks* make() {
    auto* blocks = new Blocks;
    add_fork_handlers(
        [] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
        [] { instance().mutex_.unlock(); });
    return blocks;
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
};

void* allocate_block(const std::shared_ptr<Arena>& arena, size_t bytes) {
  auto* block = arena->try_reserve(bytes);
  if (block == nullptr) return nullptr;
  Blocks::instance().add(block, arena, bytes);
  c10::profiledCPUMemoryReporter().New(block, bytes);
  return block;
}

class FrontAllocator final : public c10::Allocator {
 public:
  /// The allocator in front of the CPU allocator that was in place at the first call.
  static FrontAllocator& instance() {
    static auto* front = new FrontAllocator(*c10::GetCPUAllocator());
    return *front;
  }

  /// From the first call on, CPU allocations go through this allocator.
  static void install() {
    [[maybe_unused]] static const bool installed = instance().install_as_first_allocator();
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (const auto* services = Services::of_this_thread()) {
      if (void* block = try_allocate_served(*services, bytes)) return data_ptr(block);
    }
    // Uses instance(): LibTorch hands `this` to its threads without ordering it after the
    // constructor's writes.
    return instance().inner_.allocate(bytes);
  }

  c10::DataPtr data_ptr(void* block) const { return {block, block, &release, at::kCPU}; }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  explicit FrontAllocator(c10::Allocator& inner) : inner_(inner) {}

  // Not done by the constructor, because other threads allocate meanwhile.
  bool install_as_first_allocator() {
    // SetCPUAllocator() stores a plain pointer: a thread that finds it must find the virtual table.
    std::atomic_thread_fence(std::memory_order_release);
    // Uses the lowest priority that suffices, to leave room for a program's own allocator.
    for (int priority = 0; priority < 256 && c10::GetCPUAllocator() != this; ++priority) {
      c10::SetCPUAllocator(this, static_cast<uint8_t>(priority));
    }
    return c10::GetCPUAllocator() == this;
  }

  static void* try_allocate_served(const Services& services, size_t bytes) {
    for (auto it = services.list.rbegin(); it != services.list.rend(); ++it) {
      const auto service = it->lock();
      if (!service || !service->owner.is_this_one()) continue;
      if (std::binary_search(service->sizes.begin(), service->sizes.end(), bytes)) {
        return allocate_block(service->arena, bytes);
      }
    }
    return nullptr;
  }

  static void release(void* block) {
    if (Blocks::instance().release(block)) {
      c10::profiledCPUMemoryReporter().Delete(block);
    } else {
      instance().inner_.raw_deallocate(block);
    }
  }

  c10::Allocator& inner_;
};

}  // namespace

GradientArena::GradientArena(std::shared_ptr<Arena> arena, size_t least_bytes, Reduces reduces)
    : arena_(std::move(arena)), least_bytes_(least_bytes), reduces_(reduces) {
  FrontAllocator::install();
}

GradientArena::~GradientArena() { arena_->discard_free(); }

at::Tensor GradientArena::allocate(int64_t numel, const at::TensorOptions& options) {
  const auto type = c10::typeMetaToScalarType(options.dtype());
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(type);
  void* block = allocate_block(arena_, bytes);
  if (block == nullptr) return at::empty({numel}, options);
  auto& front = FrontAllocator::instance();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), front.data_ptr(block), &front,
      /*resizable=*/true);
  auto tensor = at::empty({0}, options);
  tensor.set_(storage, 0, {numel}, {1});
  return tensor;
}

std::shared_ptr<void> GradientArena::serve(std::vector<size_t> sizes) {
  const auto has_ended = [](const auto& service) { return service.expired(); };
  auto& services = Services::make_for_this_thread().list;
  services.erase(std::remove_if(services.begin(), services.end(), has_ended), services.end());
  auto service = std::make_shared<Service>(Service{arena_, std::move(sizes), {}});
  services.push_back(service);
  return service;
}

}  // namespace ddp::backends::shm
