#include "deferred/recorder.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ddp/internal/check.h>
#include <torch/library.h>

#include "deferred/operands.h"

namespace ddp {
namespace {

using torch::jit::Stack;

constexpr auto kKey = c10::DispatchKey::DeferredInit;
constexpr size_t kAtOnce = 4096;  // bytes that at::empty() gives memory

struct Recording {
  std::shared_ptr<Tape> tape;   // while there is a guard
  std::weak_ptr<Tape> earlier;  // goes on in the next one
  int guards = 0;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> with_memory;  // marked, and not taken
};

Recording& recording() {
  static thread_local Recording mine;
  return mine;
}

std::string text_of_tensor(const at::Tensor& tensor) {
  return ddp::str("[", joined_by(", ", tensor.sizes()), "] ", tensor.scalar_type());
}

std::string no_values_text(const at::Tensor& tensor, const std::string& made_by) {
  return ddp::str(
      "DeferredInit: expected a tensor with values, got ", text_of_tensor(tensor), " of ", made_by,
      ", which has none yet. Call ddp::materialize() of its module before anything reads it.");
}

std::string first_words(const std::string& text) {
  const auto end = std::min(text.find(". "), text.find('\n'));
  return text.substr(0, std::min<size_t>(end, 150));
}

/// The device on which a tensor is made: without an index, the current one of now.
c10::Device with_index(c10::Device device) {
  if (device.has_index() || !c10::impl::hasDeviceGuardImpl(device.type())) return device;
  const c10::impl::VirtualGuardImpl devices(device.type());
  return devices.deviceCount() > 0 ? devices.getDevice() : device;
}

/// An argument like `out=` of Python, that an operation writes its results into.
struct OutArgument {
  size_t result = 0, argument = 0;  // their numbers in the schema
};

/// The out arguments that are single tensors.
std::vector<OutArgument> out_arguments(const c10::FunctionSchema& schema) {
  std::vector<OutArgument> found;
  for (size_t k = 0; k < schema.returns().size(); ++k) {
    const auto* result = schema.returns()[k].alias_info();
    if (result == nullptr || !result->isWrite()) continue;
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const auto* alias = argument.alias_info();
      if (argument.kwarg_only() && argument.type()->kind() == c10::TypeKind::TensorType &&
          alias != nullptr && alias->beforeSets() == result->beforeSets()) {
        found.push_back({k, i});
      }
    }
  }
  return found;
}

/// One call of an operation that is no composite of others.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack, Recording& recording)
      : op_(op),
        stack_(stack),
        recording_(recording),
        tape_(*recording.tape),
        first_(stack.size() - op.schema().arguments().size()),
        random_(op.hasTag(at::Tag::nondeterministic_seeded)) {
    for (size_t i = 0; i < arguments(); ++i) {
      visit_operands(argument(i), [&](const at::Tensor& tensor) {
        has_tensors_ = true;
        const auto* slot = recorded_slot(tensor);
        if (slot == nullptr) return;
        has_deferred_ = has_deferred_ || slot->deferred;
        changes_marked_ = changes_marked_ || writes(i);
      });
    }
  }

  /// Records it and puts the results on the stack.
  ///
  /// \return  false where it is to be called as it is.
  bool record();

 private:
  const std::string& name() const { return op_.operator_name().name; }
  c10::IValue& argument(size_t i) { return stack_[first_ + i]; }
  size_t arguments() const { return stack_.size() - first_; }
  template <typename Visit>
  void visit_arguments(const Visit& visit) const {
    for (size_t i = first_; i < stack_.size(); ++i) visit_operands(stack_[i], visit);
  }
  bool writes(size_t i) const {
    const auto* alias = op_.schema().arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }
  bool writes_any() const;
  bool returns_views() const;
  bool makes_tensors() const;
  bool is_to_be_recorded() const;
  void check_can_be_recorded() const;
  bool make_with_memory();
  size_t slot_for(const at::Tensor& tensor);
  Stack infer() const;
  bool fills_out() const;
  void resize_out(const Stack& inferred);
  void note_random_numbers(Record& record);
  at::Tensor make_result(const at::Tensor& inferred, Record& record);
  Stack results(const Stack& inferred, Record& record);

  const c10::OperatorHandle& op_;
  Stack& stack_;
  Recording& recording_;
  Tape& tape_;
  const size_t first_;  // argument on the stack
  const bool random_;
  bool has_tensors_ = false, has_deferred_ = false, changes_marked_ = false;
};

bool Call::writes_any() const {
  for (size_t i = 0; i < arguments(); ++i) {
    if (writes(i)) return true;
  }
  return false;
}

bool Call::returns_views() const {
  const auto& returns = op_.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool Call::makes_tensors() const {
  const auto& returns = op_.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    const auto kind = result.type()->kind();
    return result.alias_info() == nullptr &&
           (kind == c10::TensorType::Kind || kind == c10::ListType::Kind);
  });
}

bool Call::is_to_be_recorded() const {
  // A view of memory that is not there yet is a view all the same.
  if (returns_views()) return false;
  if (op_.hasTag(at::Tag::inplace_view)) {
    return has_deferred_ && (name() == "aten::resize_" || name() == "aten::set_");
  }
  if (writes_any()) return has_deferred_ || changes_marked_ || random_;
  if (!makes_tensors()) return has_deferred_ && !op_.schema().returns().empty();
  return has_deferred_ || random_ || !has_tensors_;
}

void Call::check_can_be_recorded() const {
  at::Tensor first;
  bool needs_graph = false;
  visit_arguments([&](const at::Tensor& tensor) {
    if (!first.defined() && deferred_slot(tensor) != nullptr) first = tensor;
    needs_graph = needs_graph || tensor.requires_grad();
    DDP_CHECK(
        tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_neg() &&
            !tensor.is_conj(),
        "DeferredInit: expected plain dense tensors, got another kind in ", name(),
        ". Build this module without the guard.");
  });
  const auto subject = first.defined() ? text_of_tensor(first) + " of this guard" : "a tensor";
  DDP_CHECK(
      !op_.hasTag(at::Tag::inplace_view), "DeferredInit: expected tensors of fixed sizes, got ",
      name(), " of ", subject, ". Make it with its final sizes.");
  DDP_CHECK(
      writes_any() || makes_tensors(),
      "DeferredInit: expected operations whose results are tensors, got ", name(), " of ", subject,
      ", which needs its values. Read them after ddp::materialize(), or build this module without "
      "the guard.");
  // Module::to() takes only the data of what to() returns.
  DDP_CHECK(
      writes_any() || !needs_graph || !c10::GradMode::is_enabled() || name() == "aten::_to_copy",
      "DeferredInit: expected no graph, got ", name(), " of ", subject,
      ", which requires a gradient. Put a torch::NoGradGuard around it, or take its detach().");
}

/// at::empty() of little: torch::tensor() and others fill it through a pointer.
bool Call::make_with_memory() {
  if (name() != "aten::empty" || op_.operator_name().overload_name != "memory_format") return false;
  const auto sizes = argument(0).toIntVector();
  auto bytes = argument(1).isNone()
                   ? c10::elementSize(at::typeMetaToScalarType(at::get_default_dtype()))
                   : c10::elementSize(argument(1).toScalarType());
  for (const auto size : sizes) bytes *= static_cast<size_t>(size);
  if (bytes > kAtOnce) return false;
  op_.callBoxed(stack_);
  auto made = stack_.back().toTensor();
  if (!made.is_cpu() || made.numel() == 0) return true;
  auto* storage = made.storage().unsafeGetStorageImpl();
  mark_storage(*storage, {recording_.tape, 0, false});
  recording_.with_memory.emplace_back(made.storage().getWeakStorageImpl());
  return true;
}

/// The slot of an argument, whose memory the tape takes if it has some.
size_t Call::slot_for(const at::Tensor& tensor) {
  const auto* mark = recorded_slot(tensor);
  if (mark != nullptr && mark->deferred) {
    DDP_CHECK(
        mark->tape == recording_.tape, "DeferredInit: expected tensors of this thread's guards, ",
        "got ", text_of_tensor(tensor), " of another thread's in ", name(),
        ". Build a module on one thread.");
    return mark->slot;
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  DDP_CHECK(
      storage->resizable(),
      "DeferredInit: expected no operation that changes memory of the program's own, got ", name(),
      " of ", text_of_tensor(tensor), ". Give it a clone() of the tensor.");
  const auto slot = tape_.add_slot(storage->nbytes(), storage->device());
  tape_.slots[slot].user = tensor.storage().getWeakStorageImpl();
  tape_.slots[slot].initial =
      take_memory(*storage, {recording_.tape, slot}, no_values_text(tensor, name()));
  return slot;
}

/// The results of the call, on the meta device.
Stack Call::infer() const {
  Stack stack(stack_.begin() + static_cast<int64_t>(first_), stack_.end());
  const auto& schema = op_.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    stack[i] = with_tensors(stack[i], [&](const at::Tensor& tensor) -> at::Tensor {
      if (!tensor.defined()) return tensor;
      const auto* mark = deferred_slot(tensor);
      if (mark != nullptr) return tape_.standin_of(tensor, mark->slot);
      return at::empty_strided(
          tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory({}));
    });
    if (schema[i].name() == "device") stack[i] = c10::Device(at::kMeta);
    if (schema[i].name() == "pin_memory") stack[i] = c10::IValue();
  }
  const c10::NoGradGuard no_grad;
  op_.callBoxed(stack);
  return stack;
}

/// Whether all that it returns are tensors of out= with elements, whose sizes are right.
bool Call::fills_out() const {
  const auto out = out_arguments(op_.schema());
  return !makes_tensors() && std::all_of(out.begin(), out.end(), [&](const OutArgument& one) {
    return stack_[first_ + one.argument].toTensor().numel() > 0;
  });
}

/// As the operation does it: tensors of out= without elements get the results' sizes.
void Call::resize_out(const Stack& inferred) {
  if (inferred.empty()) return;
  for (const auto& [k, i] : out_arguments(op_.schema())) {
    const auto& result = inferred.at(k).toTensor();
    const auto& out = argument(i).toTensor();
    if (out.sizes() == result.sizes()) continue;
    DDP_CHECK(
        out.numel() == 0, "DeferredInit: expected out= of ", text_of_tensor(result), " for ",
        name(), ", got ", text_of_tensor(out),
        ". Give it a tensor of these sizes, or one without elements.");
    resize_deferred(out, result, tape_.slots[deferred_slot(out)->slot].standin);
  }
}

void Call::note_random_numbers(Record& record) {
  if (!random_) return;
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < arguments(); ++i) {
    if (argument(i).isGenerator()) generator = argument(i).toGenerator();
  }
  if (!generator) {
    const auto device = tape_.slots[record.writes.at(0)].device;
    generator = at::globalContext().defaultGenerator(device);
  }
  record.stream = tape_.stream_of(*generator);
  auto& stream = tape_.streams[*record.stream];
  const std::lock_guard lock(generator_mutex());  // a replay has another state there for a while
  const auto now = state_of(*generator);
  if (same_state(now, stream.last_seen)) return;
  record.state = mark_state(*generator, now);
  stream.last_seen = state_of(*generator);
}

/// A deferred tensor like what the meta kernel returned.
at::Tensor Call::make_result(const at::Tensor& inferred, Record& record) {
  if (!inferred.defined()) return inferred;
  DDP_CHECK(
      inferred.layout() == at::kStrided,
      "DeferredInit: expected operations that make dense tensors, got ", name(),
      ". Build this module without the guard.");
  if (const auto viewed = tape_.slot_of(inferred)) {  // as _unsafe_view() does, without saying so
    record.results.emplace_back();
    at::Tensor view;
    visit_arguments([&](const at::Tensor& tensor) {
      const auto* mark = deferred_slot(tensor);
      if (mark != nullptr && mark->slot == *viewed) view = tensor_over(tensor.storage(), inferred);
    });
    return view;
  }
  std::optional<c10::Device> device;
  for (size_t i = 0; i < arguments(); ++i) {
    if (op_.schema().arguments()[i].name() == "device" && !argument(i).isNone()) {
      device = argument(i).toDevice();
    }
  }
  visit_arguments([&](const at::Tensor& tensor) {
    if (!device) device = tensor.device();
  });
  const auto nbytes = inferred.storage().nbytes();
  const auto slot = tape_.add_slot(nbytes, device.value_or(at::kCPU));
  auto storage = make_deferred_storage(
      {recording_.tape, slot}, nbytes, tape_.slots[slot].device, no_values_text(inferred, name()));
  tape_.slots[slot].user = storage.getWeakStorageImpl();
  record.writes.push_back(slot);
  record.results.push_back(tape_.standin_of(inferred, slot));
  return tensor_over(storage, inferred);
}

/// The results of the call: arguments that it changed, and new deferred tensors.
Stack Call::results(const Stack& inferred, Record& record) {
  Stack results;
  const auto& schema = op_.schema();
  for (size_t k = 0; k < schema.returns().size(); ++k) {
    const auto* alias = schema.returns()[k].alias_info();
    if (alias == nullptr) {
      results.push_back(with_tensors(
          inferred.at(k), [&](const at::Tensor& tensor) { return make_result(tensor, record); }));
      continue;
    }
    for (size_t i = 0; i < arguments(); ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
        results.push_back(argument(i));
        break;
      }
    }
  }
  return results;
}

bool Call::record() {
  if (!has_tensors_ && make_with_memory()) return true;
  if (!is_to_be_recorded()) return false;
  check_can_be_recorded();
  for (size_t i = 0; i < arguments(); ++i) {
    if (op_.schema().arguments()[i].name() != "device" || argument(i).isNone()) continue;
    argument(i) = with_index(argument(i).toDevice());
  }
  Record record;
  record.op = op_;
  Stack inferred;
  if (makes_tensors() || !out_arguments(op_.schema()).empty()) {
    try {
      inferred = infer();
    } catch (const c10::Error& error) {
      // A factory that meta kernels do not know.
      if (!has_tensors_ && !random_) return false;
      DDP_CHECK(
          fills_out(),
          "DeferredInit: expected operations whose results' sizes are known without values, ",
          "got ", name(), " (", first_words(text_of(error)),
          "). Call it after ddp::materialize(), or build this module without the guard.");
    }
  }
  for (size_t i = 0; i < arguments(); ++i) {
    record.arguments.push_back(with_tensors(argument(i), [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (recorded_slot(tensor) == nullptr && !writes(i)) {
        // Memory that the tensor does not own may change or end without a new version.
        const auto kept = tensor.storage().resizable() ? tensor : tensor.clone();
        record.ordinary.push_back(
            {kept, kept.is_inference() ? 0 : static_cast<int64_t>(kept._version())});
        return kept;
      }
      const auto slot = slot_for(tensor);
      record.reads.push_back(slot);
      if (writes(i)) record.writes.push_back(slot);
      return tape_.standin_of(tensor, slot);
    }));
    // The default of today.
    const auto& schema = op_.schema().arguments()[i];
    if (!has_tensors_ && schema.name() == "dtype" && argument(i).isNone() && !inferred.empty() &&
        inferred[0].isTensor()) {
      record.arguments.back() = inferred[0].toTensor().scalar_type();
    }
  }
  resize_out(inferred);
  auto returned = results(inferred, record);
  if (!record.writes.empty()) {
    note_random_numbers(record);
    tape_.records.push_back(std::move(record));
  }
  torch::jit::drop(stack_, arguments());
  std::move(returned.begin(), returned.end(), std::back_inserter(stack_));
  return true;
}

void on_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  auto& mine = recording();
  // Composites call the operations that they are made of.
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard exclude(kKey);
  if (mine.tape) {  // none on a thread that took over this one's dispatch keys
    const std::lock_guard lock(mine.tape->mutex);
    if (Call(op, *stack, mine).record()) return;
  }
  op.redispatchBoxed(below, stack);
}

void register_fallback() {
  static const torch::Library library = [] {
    torch::Library made(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made.fallback(torch::CppFunction::makeFromBoxedFunction<&on_call>());
    return made;
  }();
}

}  // namespace

bool is_recording() { return recording().guards > 0; }

void begin_recording() {
  register_fallback();
  auto& mine = recording();
  if (mine.guards++ > 0) return;
  mine.tape = mine.earlier.lock();
  if (!mine.tape) mine.tape = std::make_shared<Tape>();
  mine.earlier = mine.tape;
}

void end_recording() {
  auto& mine = recording();
  if (--mine.guards > 0) return;
  for (const auto& storage : mine.with_memory) {
    const auto alive = storage.lock();
    const auto* mark = alive ? recorded_slot(*alive) : nullptr;
    if (mark != nullptr && !mark->deferred) unmark_storage(*alive);
  }
  mine.with_memory.clear();
  mine.tape.reset();
}

void check_when_materialized(const at::Tensor& tensor, ValueCheck check) {
  const auto* mark = deferred_slot(tensor);
  const auto tape = mark->tape;
  const std::lock_guard lock(tape->mutex);
  Record record;
  record.arguments = {tape->standin_of(tensor, mark->slot)};
  record.reads = {mark->slot};
  record.check = std::move(check);
  tape->records.push_back(std::move(record));
}

}  // namespace ddp
