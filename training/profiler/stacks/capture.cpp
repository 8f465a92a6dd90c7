#include "profiler/stacks/capture.h"

#include <execinfo.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include <ddp/internal/hash.h>
#include <torch/csrc/profiler/unwind/unwind.h>

namespace ddp::profiling {
namespace {

constexpr int64_t kNoStack = -1;

struct AddressesHash {
  size_t operator()(const Addresses& addresses) const {
    uint64_t hash = addresses.size();
    for (const void* address : addresses) hash = mixed(hash, reinterpret_cast<uintptr_t>(address));
    return hash;
  }
};

struct Stacks {
  std::mutex mutex;
  std::unordered_map<Addresses, int64_t, AddressesHash> numbers;
};

// Never destroyed: a thread of autograd may still be in a callback when the program ends.
Stacks& stacks_of_recording() {
  static auto& stacks = *new Stacks;
  return stacks;
}

Addresses callers() {
#ifdef __x86_64__
  return torch::unwind::unwind();  // a tenth of backtrace()'s time, on this processor alone
#else
  Addresses addresses(256);
  addresses.resize(static_cast<size_t>(backtrace(addresses.data(), 256)));
  return addresses;
#endif
}

// Where the capture ends on another thread, its callback stays registered.
std::atomic<bool> is_capturing{false};

int64_t stack_number(Addresses addresses) {
  auto& stacks = stacks_of_recording();
  const std::lock_guard<std::mutex> lock(stacks.mutex);
  const auto next = static_cast<int64_t>(stacks.numbers.size());
  return stacks.numbers.try_emplace(std::move(addresses), next).first->second;
}

/// The stack of LibTorch's operator that runs on this thread: those that it calls have the same
/// callers in the program.
thread_local int64_t stack_of_operator = kNoStack;

struct Outer : at::ObserverContext {
  int64_t stack = stack_of_operator;
  std::thread::id thread = std::this_thread::get_id();
};

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& call) {
  if (!is_capturing) return nullptr;
  auto outer = std::make_unique<Outer>();
  const bool is_function = call.scope() == at::RecordScope::FUNCTION;
  const bool is_within = is_function && stack_of_operator != kNoStack;
  const auto stack = is_within ? stack_of_operator : stack_number(callers());
  // LibTorch makes the object on the stack and has this setter; its callbacks take it as const.
  const_cast<at::RecordFunction&>(call).setDebugHandle(stack);
  // An operator of the program's may call others from several functions.
  const bool is_torchs = is_function && std::strncmp(call.name(), "aten::", 6) == 0;
  stack_of_operator = is_torchs ? stack : kNoStack;
  return outer;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* outer = static_cast<Outer*>(context);
  if (outer == nullptr) return;
  // A range may end on another thread.
  if (outer->thread == std::this_thread::get_id()) stack_of_operator = outer->stack;
}

}  // namespace

StackCapture::StackCapture() {
  auto& stacks = stacks_of_recording();
  {
    const std::lock_guard<std::mutex> lock(stacks.mutex);
    stacks.numbers.clear();
  }
  is_capturing = true;
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end));
}

StackCapture::~StackCapture() {
  is_capturing = false;
  if (thread_ == std::this_thread::get_id()) at::removeCallback(callback_);
}

std::vector<Addresses> StackCapture::stacks() const {
  auto& stacks = stacks_of_recording();
  const std::lock_guard<std::mutex> lock(stacks.mutex);
  std::vector<Addresses> by_number(stacks.numbers.size());
  for (const auto& [addresses, number] : stacks.numbers) {
    by_number[static_cast<size_t>(number)] = addresses;
  }
  return by_number;
}

}  // namespace ddp::profiling
