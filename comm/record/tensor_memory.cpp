#include <ddp/internal/tensor_memory.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/graph_task.h>

namespace ddp {
namespace {

constexpr size_t kMemoryKinds = static_cast<size_t>(MemoryKind::Uncounted);
constexpr std::array<const char*, kMemoryKinds> kNames{
    "parameters", "gradients", "optimizer", "activations", "buckets", "gathered", "other"};
constexpr int kNoKind = -1;
// Above the default allocator's; a backend's own, which serves a thread at a time, goes on top.
constexpr uint8_t kPriority = 1;

thread_local int scoped_kind = kNoKind;

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

using KindSizes = std::array<int64_t, kMemoryKinds>;

struct CountedBlock {
  c10::DataPtr memory;
  int64_t bytes;
  MemoryKind kind;
  bool is_scoped;   // the library has said the kind
  bool is_outside;  // of forward and backward passes, after the first step began
};

/// The memory of all CPU tensors that were made since.
class MemoryCounter final : public c10::Allocator {
 public:
  explicit MemoryCounter(c10::Allocator& base) : base_(base) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto memory = base_.allocate(bytes);
    if (memory.get() == nullptr || !is_counting_) return memory;
    return counted(std::move(memory), bytes, kind_now(), scoped_kind != kNoKind);
  }
  c10::DataPtr counted(c10::DataPtr memory, size_t bytes, MemoryKind kind, bool is_scoped) {
    const std::lock_guard lock(mutex_);
    auto* const data = memory.get();
    auto* const block = new CountedBlock{
        std::move(memory), static_cast<int64_t>(bytes), kind, is_scoped,
        steps_ > 0 && !is_scoped && !is_in_backward() && !c10::GradMode::is_enabled()};
    if (block->is_outside) find_gradients();
    blocks_[data] = block;
    add(block->kind, block->bytes);
    return {data, data, &MemoryCounter::free, c10::Device(c10::kCPU)};
  }
  // oneDNN allocates by raw_allocate(), for which the context of memory has to be its address.
  c10::DeleterFnPtr raw_deleter() const override { return &MemoryCounter::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void begin_step(const std::vector<at::Tensor>& tensors) {
    const std::lock_guard lock(mutex_);
    find_gradients();
    const bool is_first = steps_++ == 0;
    for (auto& [_, block] : blocks_) {
      if (block->is_scoped || block->kind == MemoryKind::Gradients) continue;
      if (is_first && !tensors.empty() && block->kind == MemoryKind::Parameters)
        retag(*block, MemoryKind::Other);
      if (block->is_outside && block->kind == MemoryKind::Other)
        retag(*block, MemoryKind::Optimizer);
    }
    parameters_.clear();
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      if (!tensor.is_cpu()) is_counting_ = false;
      tag(tensor, MemoryKind::Parameters);
      if (tensor.requires_grad()) parameters_.emplace_back(tensor.getIntrusivePtr());
    }
    find_gradients();
    if (steps_ <= 2) forget_peaks();
  }

  std::string lines() {
    const std::lock_guard lock(mutex_);
    if (!is_counting_) return "";
    std::string text;
    for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
      text +=
          ddp::str("memory\t", kNames[kind], '\t', own_peaks_[kind], '\t', at_peak_[kind], '\n');
    }
    return text + ddp::str("peak\t", peak_, '\n');
  }

 private:
  static void free(void* data);

  MemoryKind kind_now() const {
    if (scoped_kind != kNoKind) return static_cast<MemoryKind>(scoped_kind);
    if (is_in_backward()) return MemoryKind::Activations;
    if (steps_ == 0) return MemoryKind::Parameters;
    return c10::GradMode::is_enabled() ? MemoryKind::Activations : MemoryKind::Other;
  }

  void add(MemoryKind kind, int64_t bytes) {
    if (kind == MemoryKind::Uncounted) return;
    const auto k = static_cast<size_t>(kind);
    live_[k] += bytes;
    all_ += bytes;
    own_peaks_[k] = std::max(own_peaks_[k], live_[k]);
    if (all_ <= peak_) return;
    peak_ = all_;
    // Not at each allocation: gradients that a backward pass has made are looked for in all
    // parameters.
    if (is_in_backward() && peak_ > looked_at_ + looked_at_ / 64) {
      looked_at_ = peak_;
      find_gradients();
    }
    at_peak_ = live_;
  }

  void remove(MemoryKind kind, int64_t bytes) {
    if (kind == MemoryKind::Uncounted) return;
    live_[static_cast<size_t>(kind)] -= bytes;
    all_ -= bytes;
  }

  void retag(CountedBlock& block, MemoryKind kind) {
    if (block.kind == MemoryKind::Uncounted || block.kind == kind) return;
    live_[static_cast<size_t>(block.kind)] -= block.bytes;
    const auto k = static_cast<size_t>(block.kind = kind);
    live_[k] += block.bytes;
    own_peaks_[k] = std::max(own_peaks_[k], live_[k]);
  }

  void tag(const at::Tensor& tensor, MemoryKind kind) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto found = blocks_.find(tensor.storage().data());
    if (found != blocks_.end() && !found->second->is_scoped) retag(*found->second, kind);
  }

  void find_gradients() {
    for (const auto& parameter : parameters_) {
      if (const auto alive = parameter.lock()) tag(alive->grad(), MemoryKind::Gradients);
    }
  }

  void forget_peaks() {
    own_peaks_ = at_peak_ = live_;
    peak_ = all_;
    looked_at_ = 0;
  }

  c10::Allocator& base_;
  std::recursive_mutex mutex_;  // guards the members below
  std::unordered_map<const void*, CountedBlock*> blocks_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> parameters_;  // that get gradients
  KindSizes live_{}, own_peaks_{}, at_peak_{};
  int64_t all_ = 0, peak_ = 0;
  int64_t looked_at_ = 0;  // the peak at which gradients were looked for
  int64_t steps_ = 0;
  bool is_counting_ = true;
};

MemoryCounter* the_counter = nullptr;

void MemoryCounter::free(void* data) {
  CountedBlock* block = nullptr;
  {
    const std::lock_guard lock(the_counter->mutex_);
    const auto found = the_counter->blocks_.find(data);
    if (found != the_counter->blocks_.end()) {
      block = found->second;
      the_counter->remove(block->kind, block->bytes);
      the_counter->blocks_.erase(found);
    }
  }
  if (block == nullptr) return the_counter->base_.raw_deleter()(data);  // since counting has ended
  delete block;
}

}  // namespace

MemoryScope::MemoryScope(MemoryKind kind)
    : outer_(std::exchange(scoped_kind, static_cast<int>(kind))) {}

MemoryScope::~MemoryScope() { scoped_kind = outer_; }

void count_tensor_memory() {
  static const bool once = [] {
    // Never destroyed: memory is freed there until the process ends.
    the_counter = new MemoryCounter(*c10::GetCPUAllocator());
    c10::SetCPUAllocator(the_counter, kPriority);
    return true;
  }();
  (void)once;
}

c10::DataPtr counted_memory(c10::DataPtr memory, size_t bytes, MemoryKind kind) {
  if (!the_counter || !memory.get()) return memory;
  const auto own = scoped_kind == kNoKind ? kind : static_cast<MemoryKind>(scoped_kind);
  return the_counter->counted(std::move(memory), bytes, own, /*is_scoped=*/true);
}

void count_step_of_memory(const std::vector<at::Tensor>& tensors) {
  if (the_counter) the_counter->begin_step(tensors);
}

std::string tensor_memory_lines() { return the_counter ? the_counter->lines() : ""; }

}  // namespace ddp
