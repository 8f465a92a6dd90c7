#include <ddp/internal/random_state.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ddp/internal/check.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/random_streams.h>

#include <ddp/internal/checkpoint_part.h>
#include "python/torch_file.h"

namespace ddp {
namespace {

constexpr const char* kCpu = "cpu";
constexpr const char* kSeed = "seed";
constexpr const char* kStreams = "streams";

at::Generator cpu_generator() { return at::globalContext().defaultGenerator(at::kCPU); }

// The key of the states of GPUs, or of the process's other accelerator: "cuda", "xpu". Files of a
// process without an accelerator have "cuda", too.
std::string accelerator_name() {
  return c10::DeviceTypeName(at::getAccelerator().value_or(at::kCUDA), /*lower_case=*/true);
}

int64_t count_gpus() { return at::getAccelerator() ? at::accelerator::deviceCount() : 0; }

// Lists only GPUs that this process has begun to use: querying others would make a context on each.
std::vector<int64_t> gpus_in_use() {
  std::vector<int64_t> gpus;
  const auto count = count_gpus();
  if (count == 0) return gpus;
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(at::getAccelerator());
  for (int64_t gpu = 0; gpu < count; ++gpu) {
    if (hooks.hasPrimaryContext(static_cast<c10::DeviceIndex>(gpu))) gpus.push_back(gpu);
  }
  return gpus;
}

at::Generator gpu_generator(int64_t gpu) {
  return at::globalContext().defaultGenerator(
      c10::Device(*at::getAccelerator(), static_cast<c10::DeviceIndex>(gpu)));
}

// Tries a state on a copy: only the generator itself can check it.
void check_state(
    const at::Generator& generator, const c10::IValue* saved, const std::string& subject) {
  DDP_CHECK_VALUE(
      saved != nullptr && saved->isTensor(), subject,
      ": expected the state of a generator of random numbers, got none. Load another checkpoint.");
  set_generator_state(generator.clone(), saved->toTensor());
}

}  // namespace

c10::IValue random_state() {
  auto gpus = make_dict();
  for (const auto gpu : gpus_in_use()) gpus.insert(gpu, generator_state(gpu_generator(gpu)));
  auto streams = make_dict();
  for (const auto& [name, state] : random_stream_states()) streams.insert(name, state);
  return make_dict(
      {{kCpu, generator_state(cpu_generator())},
       {kSeed, static_cast<int64_t>(cpu_generator().current_seed())},
       {accelerator_name(), gpus},
       {kStreams, streams}});
}

PreparedLoad prepare_random_state(const c10::IValue& saved, const std::string& subject) {
  check_state(cpu_generator(), find_in(saved, kCpu), subject);
  std::vector<std::pair<at::Generator, at::Tensor>> states{
      {cpu_generator(), find_in(saved, kCpu)->toTensor()}};
  if (const auto* gpus = find_in(saved, accelerator_name())) {
    for (const auto& entry : gpus->toGenericDict()) {
      const auto gpu = entry.key().toInt();
      if (gpu < count_gpus()) states.emplace_back(gpu_generator(gpu), entry.value().toTensor());
    }
  }
  std::map<std::string, at::Tensor> streams;
  if (const auto* saved_streams = find_in(saved, kStreams)) {  // earlier checkpoints have none
    for (const auto& entry : saved_streams->toGenericDict()) {
      DDP_CHECK_VALUE(
          entry.value().isTensor(), subject, ": expected the state of the random numbers of ",
          entry.key(), ", got ", entry.value().tagKind(), ". Load another checkpoint.");
      streams[entry.key().toStringRef()] = entry.value().toTensor();
    }
  }
  return {[states = std::move(states), streams = std::move(streams)] {
    for (const auto& [generator, state] : states) set_generator_state(generator, state);
    set_random_stream_states(streams);
  }};
}

PreparedLoad prepare_new_random_state(
    const c10::IValue& saved_of_first, int rank, int64_t step, const std::string& subject) {
  const auto* seed = find_in(saved_of_first, kSeed);
  DDP_CHECK_VALUE(
      seed != nullptr && seed->isInt(), subject,
      ": expected the seed of rank 0, got none. Load another checkpoint.");
  auto mixed = mix_bits(static_cast<uint64_t>(seed->toInt()));
  mixed = mix_bits(mixed ^ static_cast<uint64_t>(rank));
  mixed = mix_bits(mixed ^ static_cast<uint64_t>(step));
  return {[mixed] {
    std::vector<at::Generator> generators{cpu_generator()};
    for (const auto gpu : gpus_in_use()) generators.push_back(gpu_generator(gpu));
    for (auto& generator : generators) {
      const std::lock_guard lock(generator.mutex());
      generator.set_current_seed(mixed);
    }
  }};
}

namespace detail {
namespace {

class GeneratorPart : public CheckpointPart {
 public:
  explicit GeneratorPart(at::Generator& generator) : generator_(generator) {}

  c10::IValue state() override { return generator_state(generator_); }
  PreparedLoad prepare(const c10::IValue& saved, const LoadContext& context) override {
    check_state(generator_, &saved, context.subject);
    return {[this, state = saved.toTensor()] { set_generator_state(generator_, state); }};
  }

 private:
  at::Generator& generator_;
};

}  // namespace

CheckpointPartPtr part_of_generator(at::Generator& generator) {
  DDP_CHECK_VALUE(
      generator.defined(),
      "Checkpointer::add: expected a generator, got an undefined one. Make one first.");
  return std::make_shared<GeneratorPart>(generator);
}

}  // namespace detail
}  // namespace ddp
