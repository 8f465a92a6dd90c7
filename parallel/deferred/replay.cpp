#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <ddp/internal/check.h>

#include "deferred/operands.h"
#include "deferred/tape.h"

namespace ddp {
namespace {

/// Has a generator in another state for its scope.
class StateInPlace {
 public:
  StateInPlace(const at::Generator& generator, const at::Tensor& state)
      : lock_(generator_mutex()), generator_(generator), found_(state_of(generator)) {
    set_state(generator_, state);
  }
  ~StateInPlace() { set_state(generator_, found_); }
  StateInPlace(const StateInPlace&) = delete;
  StateInPlace& operator=(const StateInPlace&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  const at::Generator generator_;
  const at::Tensor found_;
};

/// Computes the values of some slots from the records.
///
/// Records of other slots are not repeated, but their random numbers are drawn once, into memory
/// that is freed at once: then the state before each later record is known, in whatever order
/// modules are materialized.
class Replay {
 public:
  Replay(Tape& tape, const std::vector<size_t>& wanted)
      : tape_(tape),
        wanted_(wanted.begin(), wanted.end()),
        memory_(tape.slots.size()),
        last_use_(tape.slots.size(), 0),
        needed_(tape.records.size(), false) {}

  std::vector<std::function<void()>> run();

 private:
  void find_needed();
  bool is_needed(const Record& record, const std::unordered_set<size_t>& slots) const;
  c10::Storage& memory_of(size_t slot);
  void repeat(size_t i);
  void draw_numbers_of(size_t i);
  void draw_numbers_of_the_dead();
  void with_numbers(Record& record, const std::function<void()>& call);
  torch::jit::Stack call(const Record& record);
  void take_results(const Record& record, const torch::jit::Stack& results);
  void take_result(const Record& record, const at::Tensor& standin, const at::Tensor& result);
  void give_results();
  void leave_generators();

  Tape& tape_;
  const std::unordered_set<size_t> wanted_;
  std::vector<c10::Storage> memory_;  // of slots, while their values are in use
  std::vector<size_t> last_use_;      // record that uses a slot
  std::vector<bool> needed_;          // records
  size_t end_ = 0;                    // after the last record that is needed
  std::vector<std::function<void()>> checks_;
};

bool Replay::is_needed(const Record& record, const std::unordered_set<size_t>& slots) const {
  const auto& touched = record.check ? record.reads : record.writes;
  const auto is_wanted = [&](size_t slot) { return slots.count(slot) == 1; };
  if (std::any_of(touched.begin(), touched.end(), is_wanted)) return true;
  return end_ > 0 && record.stream && !record.drawn && !record.needs_only_itself();
}

/// From the last record to the first: what a needed one reads is needed before it.
void Replay::find_needed() {
  auto slots = wanted_;
  for (size_t i = tape_.records.size(); i-- > 0;) {
    const auto& record = tape_.records[i];
    if (!is_needed(record, slots)) continue;
    needed_[i] = true;
    end_ = std::max(end_, i + 1);
    for (const auto slot : record.writes) last_use_[slot] = std::max(last_use_[slot], i);
    for (const auto slot : record.reads) last_use_[slot] = std::max(last_use_[slot], i);
    for (const auto& made : record.results) {
      if (made.defined()) slots.erase(*tape_.slot_of(made));
    }
    slots.insert(record.reads.begin(), record.reads.end());
  }
}

c10::Storage& Replay::memory_of(size_t slot) {
  auto& memory = memory_[slot];
  if (memory) return memory;
  const auto& description = tape_.slots[slot];
  memory = allocate_storage(description.standin.nbytes(), description.device);
  if (!description.initial) return memory;
  // An operation may have made the storage larger since.
  const auto bytes = at::empty(
      {static_cast<int64_t>(description.initial.nbytes())},
      at::TensorOptions(at::kByte).device(at::kMeta));
  tensor_over(memory, bytes).copy_(tensor_over(description.initial, bytes));
  return memory;
}

torch::jit::Stack Replay::call(const Record& record) {
  for (const auto& input : record.ordinary) {
    DDP_CHECK(
        input.tensor.is_inference() || input.tensor._version() == input.version,
        "DeferredInit: expected a tensor that was used under the guard as it was there, got [",
        joined_by(", ", input.tensor.sizes()),
        "] that was changed since. Give the guard a clone().");
  }
  torch::jit::Stack stack;
  for (const auto& argument : record.arguments) {
    stack.push_back(with_tensors(argument, [&](const at::Tensor& tensor) {
      const auto slot = tape_.slot_of(tensor);
      return slot ? tensor_over(memory_of(*slot), tensor) : tensor;
    }));
  }
  try {
    record.op->callBoxed(stack);
  } catch (const c10::Error& error) {
    DDP_CHECK(
        false, "DeferredInit: expected recorded operations to work, but ",
        record.op->operator_name().name, " threw: ", text_of(error));
  }
  return stack;
}

void Replay::take_result(
    const Record& record, const at::Tensor& standin, const at::Tensor& result) {
  const auto slot = *tape_.slot_of(standin);
  bool is_own = true;
  for (const auto read : record.reads) {
    is_own = is_own && !(memory_[read] && memory_[read].is_alias_of(result.storage()));
  }
  for (const auto& input : record.ordinary) is_own = is_own && !input.tensor.is_alias_of(result);
  if (is_own && result.scalar_type() == standin.scalar_type() &&
      result.sizes() == standin.sizes() && result.strides() == standin.strides() &&
      result.storage_offset() == standin.storage_offset()) {
    memory_[slot] = result.storage();
  } else {
    tensor_over(memory_of(slot), standin).copy_(result);
  }
}

void Replay::take_results(const Record& record, const torch::jit::Stack& results) {
  size_t k = 0;
  const auto& returns = record.op->schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].alias_info() != nullptr) continue;
    visit_operands(results[i], [&](const at::Tensor& result) {
      const auto& standin = record.results.at(k++);
      if (standin.defined()) take_result(record, standin, result);
    });
  }
}

void Replay::with_numbers(Record& record, const std::function<void()>& call) {
  if (!record.stream) return call();
  auto& stream = tape_.streams[*record.stream];
  const auto before = record.state.defined() ? record.state : stream.reached;
  const StateInPlace in_place(stream.generator, before);
  call();
  if (record.drawn) return;
  record.state = before;
  record.drawn = true;
  stream.reached = state_of(stream.generator);
}

void Replay::repeat(size_t i) {
  auto& record = tape_.records[i];
  if (record.check) {
    const auto& standin = record.arguments[0].toTensor();
    checks_.push_back(record.check(tensor_over(memory_of(record.reads[0]), standin)));
    record = Record{};
    return;
  }
  with_numbers(record, [&] { take_results(record, call(record)); });
  for (const auto* slots : {&record.reads, &record.writes}) {
    for (const auto slot : *slots) {
      if (last_use_[slot] == i && wanted_.count(slot) == 0) memory_[slot] = {};
    }
  }
}

void Replay::draw_numbers_of(size_t i) {
  auto& record = tape_.records[i];
  with_numbers(record, [&] { call(record); });
  for (const auto slot : record.writes) memory_[slot] = {};
}

/// Nothing will ever need the last records if no tensor has their results any more.
void Replay::draw_numbers_of_the_dead() {
  for (size_t i = end_; i < tape_.records.size(); ++i) {
    const auto& record = tape_.records[i];
    if (!record.stream || record.drawn) continue;
    const bool dead = std::all_of(record.writes.begin(), record.writes.end(), [&](size_t slot) {
      return tape_.slots[slot].user.expired();
    });
    if (!dead || !record.needs_only_itself()) return;
    draw_numbers_of(i);
    end_ = i + 1;
  }
}

void Replay::give_results() {
  for (const auto slot : wanted_) {
    auto& description = tape_.slots[slot];
    const auto storage = description.user.lock();
    if (!storage) continue;
    give_memory(*storage, memory_of(slot));
    description.materialized = true;
  }
}

/// Where no other numbers were drawn since, the generators go on after those of the records.
void Replay::leave_generators() {
  for (size_t s = 0; s < tape_.streams.size(); ++s) {
    auto& stream = tape_.streams[s];
    const auto continues = [&](const Record& record) {
      return record.stream != s || record.drawn || !record.state.defined();
    };
    const auto rest = tape_.records.begin() + static_cast<int64_t>(end_);
    if (!stream.reached.defined() || !std::all_of(rest, tape_.records.end(), continues)) continue;
    const std::lock_guard lock(generator_mutex());
    if (!same_state(state_of(stream.generator), stream.last_seen)) continue;
    set_state(stream.generator, stream.reached);
    stream.last_seen = stream.reached;
  }
}

std::vector<std::function<void()>> Replay::run() {
  find_needed();
  for (size_t i = 0; i < end_; ++i) {
    const auto& record = tape_.records[i];
    if (needed_[i]) {
      repeat(i);
    } else if (record.stream && !record.drawn) {
      draw_numbers_of(i);
    }
  }
  draw_numbers_of_the_dead();
  give_results();
  leave_generators();
  tape_.forget_what_is_done();
  return std::move(checks_);
}

}  // namespace

std::vector<std::function<void()>> replay(Tape& tape, const std::vector<size_t>& slots) {
  const c10::impl::ExcludeDispatchKeyGuard exclude(c10::DispatchKey::DeferredInit);
  const c10::NoGradGuard no_grad;
  return Replay(tape, slots).run();
}

}  // namespace ddp
