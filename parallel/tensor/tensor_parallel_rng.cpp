#include <ddp/tensor_parallel_rng.h>

#include <mutex>
#include <vector>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Generator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/random_streams.h>

#include "deferred/recorder.h"

namespace ddp {
namespace {

constexpr uint64_t kSeedOffset = 2718;  // Megatron-LM's

uint64_t seed_of_rank(uint64_t seed, const ProcessGroup& group) {
  return mix_bits(mix_bits(seed + kSeedOffset) + static_cast<uint64_t>(group->getRank()));
}

std::vector<c10::Device> devices_in_use() {
  std::vector<c10::Device> devices{c10::Device(at::kCPU)};
  const auto accelerator = at::getAccelerator();
  if (accelerator && at::accelerator::deviceCount() > 0) {
    devices.push_back(c10::impl::VirtualGuardImpl(*accelerator).getDevice());
  }
  return devices;
}

void swap_states(at::Generator one, at::Generator other) {
  const std::scoped_lock lock(one.mutex(), other.mutex());
  const auto state = one.get_state();
  one.set_state(other.get_state());
  other.set_state(state);
}

// Active RNG of this thread; null: the default generators.
thread_local const c10d::ProcessGroup* active_group = nullptr;

}  // namespace

struct TensorParallelRng::Impl {
  explicit Impl(const ProcessGroup& group) {
    DDP_CHECK(
        active_group == nullptr || active_group == group.get(),
        "TensorParallelRng: expected no guard of another group around it, got one ",
        on_rank_text(*group), ". End that one before.");
    DDP_CHECK(
        !is_recording(), "TensorParallelRng: expected no DeferredInit guard around it, got one ",
        on_rank_text(*group), ". Draw these values after ddp::materialize().");
    if (active_group != nullptr) return;
    active_group = group.get();
    for (const auto& device : devices_in_use()) {
      const auto& generator = at::globalContext().defaultGenerator(device);
      const auto seed = seed_of_rank(generator.current_seed(), group);
      swapped.push_back({generator, random_stream_of(group, device, seed)});
    }
    swap();
  }
  ~Impl() {
    if (swapped.empty()) return;
    swap();
    active_group = nullptr;
  }
  C10_DISABLE_COPY_AND_ASSIGN(Impl);

  void swap() const {
    for (const auto& [generator, stream] : swapped) swap_states(generator, stream);
  }

  struct Pair {
    at::Generator generator, stream;
  };
  std::vector<Pair> swapped;
};

TensorParallelRng::TensorParallelRng(const GroupArg& group)
    : impl_(std::make_unique<Impl>(group.get())) {}

TensorParallelRng::~TensorParallelRng() = default;

void TensorParallelRng::manual_seed(uint64_t seed, const GroupArg& group) {
  const auto& ranks = group.get();
  DDP_CHECK(
      active_group == nullptr,
      "TensorParallelRng::manual_seed: expected no guard around it, got one ", on_rank_text(*ranks),
      ". Call it before.");
  const auto of_rank = seed_of_rank(seed, ranks);
  for (const auto& device : devices_in_use()) {
    auto stream = random_stream_of(ranks, device, of_rank);
    const std::lock_guard lock(stream.mutex());
    stream.set_current_seed(of_rank);
  }
}

}  // namespace ddp
