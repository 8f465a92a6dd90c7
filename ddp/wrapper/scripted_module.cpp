#include <ddp/scripted_module.h>

#include <set>

#include <ATen/core/grad_mode.h>
#include <ddp/detail/running_statistics.h>
#include <ddp/internal/check.h>
#include <ddp/internal/join_names.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

/// A batch normalization that Python has scripted.
class ScriptedBatchNorm : public detail::ScriptedPart, public detail::HasRunningStatistics {
 public:
  using ScriptedPart::ScriptedPart;
};

// "__torch__.torch.nn.modules.batchnorm.BatchNorm2d", with "___torch_mangle_3" somewhere in it.
bool is_batch_norm(const torch::jit::Module& script) {
  const auto name = script.type()->name();
  return name && name->qualifiedName().find("torch.nn.modules.batchnorm.") != std::string::npos;
}

std::shared_ptr<detail::ScriptedPart> part_of_script(
    const torch::jit::Module& script, detail::ScriptedPart::Seen& seen) {
  if (is_batch_norm(script)) return std::make_shared<ScriptedBatchNorm>(script, seen);
  return std::make_shared<detail::ScriptedPart>(script, seen);
}
std::shared_ptr<detail::ScriptedPart> part_of_script(const torch::jit::Module& script) {
  detail::ScriptedPart::Seen seen;
  return part_of_script(script, seen);
}

/// The names of attributes that hold tensors which are neither parameters nor buffers.
std::vector<std::string> names_of_other_tensors(const torch::jit::Module& script) {
  std::set<std::string> known;
  for (const auto& parameter : script.named_parameters()) known.insert(parameter.name);
  for (const auto& buffer : script.named_buffers()) known.insert(buffer.name);
  std::vector<std::string> names;
  for (const auto& attribute : script.named_attributes()) {
    bool holds_tensor = false;
    const TensorSink note = [&](const at::Tensor& t) { holds_tensor |= t.defined(); };
    if (!attribute.value.isObject()) for_each_tensor(attribute.value, note);
    if (holds_tensor && !known.count(attribute.name)) names.push_back(attribute.name);
  }
  return names;
}

void warn_of_other_tensors(const torch::jit::Module& script) {
  const auto names = names_of_other_tensors(script);
  if (names.empty()) return;
  TORCH_WARN(
      "DistributedDataParallel: expected the tensors of a TorchScript module to be parameters and "
      "buffers, got others in ",
      join_names(names),
      ": they are neither averaged, compared nor sent, so each rank keeps its own. Register them "
      "one by one.");
}

/// \param script  a deep copy, whose parameters have lost that they require a gradient.
void copy_requires_grad(const torch::jit::Module& from, const torch::jit::Module& script) {
  auto of_copy = script.named_parameters().begin();
  for (const auto& parameter : from.named_parameters()) {
    (*of_copy).value.set_requires_grad(parameter.value.requires_grad());
    ++of_copy;
  }
}

torch::jit::Module copy_of(
    const torch::jit::Module& script, const std::optional<c10::Device>& device) {
  const at::NoGradGuard no_grad;
  auto copy = script.deepcopy();
  if (device) copy.to(*device);
  copy_requires_grad(script, copy);
  return copy;
}

}  // namespace

namespace detail {

ScriptedPart::ScriptedPart(torch::jit::Module script, Seen& seen)
    : torch::nn::Module("ScriptModule"), script_(std::move(script)) {
  const auto& type = *script_.type();
  // Before there are children, which may be in another mode.
  torch::nn::Module::train(!type.hasAttribute("training") || script_.is_training());
  for (const auto& parameter : script_.named_parameters(/*recurse=*/false)) {
    const auto& tensor = parameter.value;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    register_parameter(parameter.name, tensor, tensor.requires_grad());
  }
  for (const auto& buffer : script_.named_buffers(/*recurse=*/false)) {
    register_buffer(buffer.name, buffer.value);
    buffers_of_script_.push_back({{buffer.name, type.getAttributeSlot(buffer.name)}, buffer.value});
  }
  for (const auto& child : script_.named_children()) {
    parts_.emplace_back(child.name, register_module(child.name, part_of_script(child.value, seen)));
  }
}

void ScriptedPart::train(bool on) {
  torch::nn::Module::train(on);
  if (script_.hasattr("training")) script_.setattr("training", on);
}

std::shared_ptr<torch::nn::Module> ScriptedPart::clone(
    const std::optional<c10::Device>& device) const {
  return part_of_script(copy_of(script_, device));
}

void ScriptedPart::check_buffers() const {
  for (const auto& [buffer, tensor] : buffers_of_script_) {
    DDP_CHECK(
        script_._ivalue()->getSlot(buffer.slot).toTensor().is_same(tensor),
        "DistributedDataParallel: expected a TorchScript module that writes its buffers in place, "
        "got one whose forward has assigned another tensor to \"",
        buffer.name, "\" of ", script_.type()->name()->qualifiedName(), ". Write self.",
        buffer.name, ".copy_(...) in its place.");
  }
  for (const auto& [name, part] : parts_) part->check_buffers();
}

}  // namespace detail

c10::IValue detail::Mover<c10::IValue>::move(const TensorMove& to, const c10::IValue& value) {
  if (value.isTensor()) return to(value.toTensor());
  if (value.isTuple()) {
    const auto& tuple = value.toTupleRef();
    std::vector<c10::IValue> elements;
    for (const auto& element : tuple.elements()) elements.push_back(move(to, element));
    return c10::ivalue::Tuple::createNamed(std::move(elements), tuple.type<c10::TupleType>());
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList moved(list.elementType());
    for (const auto& element : list) moved.push_back(move(to, element));
    return moved;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict moved(dict.keyType(), dict.valueType());
    for (const auto& item : dict) moved.insert(item.key(), move(to, item.value()));
    return moved;
  }
  return value;
}

using Impl = DistributedDataParallelImpl<torch::jit::Module>;

Impl::DistributedDataParallelImpl(
    torch::jit::Module module, const DistributedDataParallelOptions& options)
    : DistributedDataParallelImpl(part_of_script(module), options) {}

Impl::DistributedDataParallelImpl(
    std::shared_ptr<detail::ScriptedPart> part, const DistributedDataParallelOptions& options)
    : DistributedDataParallelBase(part, options), part_(std::move(part)), module_(part_->script()) {
  warn_of_other_tensors(module_);
}

c10::IValue Impl::forward(std::vector<c10::IValue> inputs, const torch::jit::Kwargs& kwargs) {
  note_inputs(inputs, kwargs);
  const auto rows = counts_samples() ? detail::rows_of_first_tensor(inputs, kwargs) : std::nullopt;
  return run_pass(rows, [&] {
    const auto& placement = input_placement();
    if (!placement.changes_inputs()) return module_.forward(std::move(inputs), kwargs);
    return module_.forward(placement.placed(inputs), placement.placed(kwargs));
  });
}

torch::jit::Module Impl::snapshot(const std::optional<c10::Device>& device) const {
  return std::dynamic_pointer_cast<detail::ScriptedPart>(clone(device))->script();
}

}  // namespace ddp
