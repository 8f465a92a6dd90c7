#include <ddp/detail/recompute.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/functional.h>
#include <c10/core/GradMode.h>
#include <c10/util/FunctionRef.h>
#include <ddp/detail/running_statistics.h>
#include <ddp/internal/accumulating_edges.h>
#include <ddp/internal/autograd_node.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/repeated_call.h>
#include <ddp/internal/text.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include "call_state.h"
#include "saved_tensors/saved_tensor_hooks.h"

namespace ddp::detail {
namespace {

using torch::autograd::CreationMeta;
using torch::autograd::DifferentiableViewMeta;
using torch::autograd::Node;
using torch::autograd::variable_list;

bool is_made_since(const Node& node, const Node& other) {
  return other.thread_id() == node.thread_id() && other.sequence_nr() > node.sequence_nr();
}

/// Visits each node of the graph of `outputs` once, and goes on below those for which `visit` is
/// true.
void walk(const std::vector<at::Tensor>& outputs, c10::function_ref<bool(Node&)> visit) {
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto note = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.defined()) note(output.grad_fn().get());
  }
  while (!open.empty()) {
    auto* node = open.back();
    open.pop_back();
    if (!visit(*node)) continue;
    for (const auto& edge : node->next_edges()) note(edge.function.get());
  }
}

template <typename BatchNorm>
void note_statistics(const Node& node, std::vector<at::Tensor>& found) {
  const auto* norm = dynamic_cast<const BatchNorm*>(&node);
  if (norm == nullptr || !norm->training) return;
  const auto mean = norm->running_mean_.unpack();
  // instance_norm() makes a tensor of its own for each call, and copies it back.
  constexpr size_t kOfNodeAndHere = 2;
  if (mean.defined() && mean.use_count() > kOfNodeAndHere) found.push_back(mean);
}

/// Whether operations on this thread after the making of `node` made the tensor's graph; else it
/// has one of its own, or none.
bool has_graph_since(const Node& node, const at::Tensor& tensor) {
  const auto& function = tensor.grad_fn();
  return function && is_made_since(node, *function);
}

/// Takes a tensor out of its graph, which nothing refers to then, and makes it a result of `node`.
/// Changing it in place is an error if it is a view: the gradient of the tensor that it is a view
/// of would not know.
void move_to_node(const NodePtr& node, const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view != nullptr && view->has_bw_view()) {
    torch::autograd::ViewInfo of_base(at::Tensor(tensor._base()).detach(), nullptr, nullptr);
    impl->set_autograd_meta(std::make_unique<DifferentiableViewMeta>(
        impl, std::move(of_base), std::nullopt, /*shared_view_info=*/false,
        CreationMeta::IN_CUSTOM_FUNCTION));
  } else {
    impl->set_autograd_meta(nullptr);
  }
  torch::autograd::set_history(tensor, node);
}

/// The running means that batch normalizations in training mode have moved, in the graph of
/// `outputs` since `node` was made.
std::vector<at::Tensor> moved_statistics(const std::vector<at::Tensor>& outputs, const Node& node) {
  std::vector<at::Tensor> found;
  walk(outputs, [&](Node& other) {
    if (!is_made_since(node, other)) return false;
    note_statistics<torch::autograd::generated::NativeBatchNormBackward0>(other, found);
    note_statistics<torch::autograd::generated::CudnnBatchNormBackward0>(other, found);
    note_statistics<torch::autograd::generated::MiopenBatchNormBackward0>(other, found);
    return true;
  });
  return found;
}

/// Checks that every leaf of the graph of `outputs` is among `known`: otherwise its gradient would
/// be lost.
void check_leaves(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& known) {
  std::unordered_set<const c10::TensorImpl*> known_leaves;
  for (const auto& leaf : known) known_leaves.insert(leaf.unsafeGetTensorImpl());
  walk(outputs, [&](Node& node) {
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
      DDP_CHECK(
          known_leaves.count(leaf->variable.unsafeGetTensorImpl()) == 1,
          "checkpoint: expected a result that depends on the arguments and the named parameters, "
          "got one that depends on another tensor ",
          leaf->variable.sizes(),
          " that requires a gradient. Pass it as an argument, or name it in "
          "CheckpointOptions().parameters().");
    }
    return true;
  });
}

bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  return c10::fmap(tensors, version_of);
}

std::vector<c10::Device> accelerators_of(const RepeatableCall& call) {
  std::vector<c10::Device> devices;
  for (const auto* tensors : {&call.inputs, &call.parameters}) {
    for (const auto& tensor : *tensors) {
      if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) continue;
      if (!contains(devices, tensor.device())) devices.push_back(tensor.device());
    }
  }
  return devices;
}

/// Removes the hooks of parameters for its scope: the outer backward calls them, on the gradient
/// that the inner one computes.
class WithoutHooks {
 public:
  explicit WithoutHooks(const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) {
      auto& hooks = torch::autograd::impl::hooks(parameter);
      if (!hooks.empty()) taken_.emplace_back(parameter, std::exchange(hooks, {}));
    }
  }
  ~WithoutHooks() {
    for (auto& [parameter, hooks] : taken_) {
      std::swap(torch::autograd::impl::hooks(parameter), hooks);
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(WithoutHooks);

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> taken_;
};

/// The buffers of the calls that run on this thread, the innermost last.
thread_local std::vector<const CallBuffers*> open_calls;

void check_are_named(const std::vector<at::Tensor>& statistics, const CallBuffers& call) {
  for (const auto& tensor : statistics) {
    DDP_CHECK(
        call.has_statistics(tensor),
        "checkpoint: expected the running statistics of modules that are named, got others, ",
        tensor.sizes(), " ", tensor.scalar_type(),
        ", which a repetition would move once more. Name the module that has them in "
        "CheckpointOptions().modules().");
  }
}

void take_buffers_of(
    const torch::nn::Module& module, const std::string& prefix, RepeatableCall& call) {
  const bool are_statistics = has_running_statistics(module);
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (!buffer.value().defined()) continue;
    if (are_statistics) {
      call.statistics.push_back(buffer.value());
    } else {
      call.buffers.push_back(buffer.value());
      call.buffer_names.push_back(prefix + buffer.key());
    }
  }
  for (const auto& child : module.named_children()) {
    take_buffers_of(*child.value(), prefix + child.key() + ".", call);
  }
}

}  // namespace

void RepeatableCall::take_from(const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) {
    if (!requires_grad(parameter.value())) continue;
    parameters.push_back(parameter.value());
    names.push_back(parameter.key());
  }
  take_buffers_of(module, "", *this);
}

void RepeatableCall::take_from(const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!requires_grad(tensors[i])) continue;
    parameters.push_back(tensors[i]);
    names.push_back(ddp::str(i, " of CheckpointOptions().parameters()"));
  }
}

bool RepeatableCall::needs_gradients() const {
  return c10::GradMode::is_enabled() && (!parameters.empty() || any_of(inputs, requires_grad));
}

void check_statistics_are_named(const std::vector<at::Tensor>& statistics) {
  for (const auto* call : open_calls) check_are_named(statistics, *call);
}

class Recomputation::Node : public torch::autograd::Node {
 public:
  Node(RepeatableCall call, int64_t number)
      : number_(number),
        context_(accelerators_of(call), call.preserve_rng_state),
        input_versions_(versions_of(call.inputs)),
        parameter_versions_(versions_of(call.parameters)),
        buffers_(call.buffers, call.buffer_names, call.statistics),
        call_(std::move(call)) {
    auto inputs = call_->inputs;
    inputs.insert(inputs.end(), call_->parameters.begin(), call_->parameters.end());
    set_next_edges(accumulating_edges(inputs));
  }

  std::string name() const override { return "ddp::Recomputation"; }
  void release_variables() override { call_.reset(); }

  void connect(const NodePtr& self, const std::vector<at::Tensor>& outputs);
  const CallBuffers& buffers() const { return buffers_; }

 protected:
  variable_list apply(variable_list&& gradients) override;

 private:
  variable_list detached_inputs() const;
  void check_changed_nothing() const;
  void check_unchanged() const;
  void check_matches_forward(const std::vector<at::Tensor>& outputs) const;

  const int64_t number_;  // as of repeated_call()
  const CallContext context_;
  const std::vector<int64_t> input_versions_;
  const std::vector<int64_t> parameter_versions_;
  CallBuffers buffers_;
  std::optional<RepeatableCall> call_;  // until its backward
  size_t outputs_ = 0;                  // number of tensors in the result
  std::vector<size_t> connected_;       // indices of those whose gradient function is this node
};

void Recomputation::Node::connect(const NodePtr& self, const std::vector<at::Tensor>& outputs) {
  check_changed_nothing();
  check_are_named(moved_statistics(outputs, *this), buffers_);
  buffers_.end_call();
  outputs_ = outputs.size();
  for (size_t i = 0; i < outputs.size(); ++i) {
    // An argument that is returned, or a tensor from elsewhere, keeps its own graph, or none.
    if (!outputs[i].defined() || !has_graph_since(*this, outputs[i])) continue;
    move_to_node(self, outputs[i]);
    connected_.push_back(i);
  }
}

void Recomputation::Node::check_changed_nothing() const {
  for (size_t i = 0; i < call_->inputs.size(); ++i) {
    DDP_CHECK(
        version_of(call_->inputs[i]) == input_versions_[i],
        "checkpoint: expected a function that leaves its arguments as they are, got one that "
        "modifies tensor ",
        i, " of them by an inplace operation, and could not repeat that. Modify a clone().");
  }
  for (size_t i = 0; i < call_->parameters.size(); ++i) {
    DDP_CHECK(
        version_of(call_->parameters[i]) == parameter_versions_[i],
        "checkpoint: expected a function that leaves its parameters as they are, got one that "
        "itself writes parameter ",
        call_->names[i],
        ", and would do so once more in backward. Write it outside of the function.");
  }
}

variable_list Recomputation::Node::detached_inputs() const {
  variable_list inputs;
  for (const auto& input : call_->inputs) {
    inputs.push_back(
        requires_grad(input) ? input.detach().requires_grad_()
        : input.defined()    ? input.detach()
                             : input);
  }
  return inputs;
}

void Recomputation::Node::check_unchanged() const {
  for (size_t i = 0; i < call_->inputs.size(); ++i) {
    DDP_CHECK(
        version_of(call_->inputs[i]) == input_versions_[i], "checkpoint: expected tensor ", i,
        " of the arguments as it was in forward, got one that was modified by an inplace "
        "operation. Pass a clone().");
  }
  for (size_t i = 0; i < call_->parameters.size(); ++i) {
    DDP_CHECK(
        version_of(call_->parameters[i]) == parameter_versions_[i],
        "checkpoint: expected parameter ", call_->names[i],
        " as it was in forward, got one that was modified by an inplace operation. Step the "
        "optimizer after backward.");
  }
}

void Recomputation::Node::check_matches_forward(const std::vector<at::Tensor>& outputs) const {
  DDP_CHECK(
      outputs.size() == outputs_, "checkpoint: expected the ", outputs_,
      " tensors that the function returned in forward, got ", outputs.size(),
      ". It has to do the same twice.");
  if (!call_->determinism_check) return;
  for (size_t k = 0; k < connected_.size(); ++k) {
    const auto& first = input_metadata(k);
    const auto& second = outputs[connected_[k]];
    DDP_CHECK(
        second.defined() && second.sym_sizes() == first.shape_as_dim_vector() &&
            second.options().type_equal(first.options()) && second.device() == first.device(),
        "checkpoint: expected tensor ", connected_[k], " of the result as in forward, ",
        first.shape_as_dim_vector(), " ", first.dtype().toScalarType(), ", got ",
        second.defined() ? ddp::str(second.sizes(), " ", second.scalar_type()) : "an undefined one",
        ". The function has to do the same twice: look for what depends on a counter, on the time, "
        "or on random numbers of a generator of its own.");
  }
}

variable_list Recomputation::Node::apply(variable_list&& gradients) {
  DDP_CHECK(
      call_.has_value(),
      "checkpoint: trying to backward through the graph a second time: expected retain_graph in "
      "the first, got none. Pass retain_graph=true there, or compute forward again.");
  DDP_CHECK(
      !c10::GradMode::is_enabled(),
      "checkpoint: expected a backward without create_graph, got one with it. Leave checkpoint() "
      "out where second derivatives are needed.");
  check_unchanged();

  const RepeatedCallScope scope(number_);
  const auto inputs = detached_inputs();
  const CallBuffers::Restored buffers(buffers_);  // until operations that saved them have run
  variable_list outputs;
  variable_list output_gradients;
  {
    const c10::AutoGradMode with_grad(true);
    const CallContext::Restored context(context_);
    const auto results = call_->run(inputs);
    check_matches_forward(results);
    for (size_t k = 0; k < connected_.size(); ++k) {
      const auto& result = results[connected_[k]];
      if (!gradients[k].defined() || !requires_grad(result)) continue;
      outputs.push_back(result);
      output_gradients.push_back(std::move(gradients[k]));
    }
  }

  variable_list wanted;
  std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(wanted), requires_grad);
  wanted.insert(wanted.end(), call_->parameters.begin(), call_->parameters.end());
  variable_list found(wanted.size());
  if (!outputs.empty()) {
    check_leaves(outputs, wanted);
    const WithoutHooks no_hooks(call_->parameters);
    found = torch::autograd::grad(
        outputs, wanted, output_gradients, /*retain_graph=*/false, /*create_graph=*/false,
        /*allow_unused=*/true);
  }
  variable_list result;
  auto next = found.begin();
  for (const auto& input : inputs) {
    result.push_back(requires_grad(input) ? std::move(*next++) : at::Tensor());
  }
  std::move(next, found.end(), std::back_inserter(result));
  return result;
}

struct Recomputation::Scopes {
  Scopes() : number(repeated_call() == 0 ? new_repeated_call() : repeated_call()) {}
  ~Scopes() {
    if (is_open) open_calls.pop_back();
  }
  void open(const CallBuffers& call) {
    check_statistics_are_named(call.statistics());
    open_calls.push_back(&call);
    is_open = true;
  }

  const RepeatedCallScope number;
  const WithoutSavedTensorHooks no_hooks;  // the call's graph ends with it
  bool is_open = false;
};

Recomputation::Recomputation(RepeatableCall call)
    : scopes_(std::make_unique<Scopes>()),
      node_(make_node<Node>(std::move(call), repeated_call())) {
  scopes_->open(static_cast<Node&>(*node_).buffers());
}

Recomputation::~Recomputation() = default;

void Recomputation::connect(const std::vector<at::Tensor>& outputs) {
  static_cast<Node&>(*node_).connect(node_, outputs);
}

void check_result_understood(bool understood, const std::string& type) {
  DDP_CHECK(
      understood, "checkpoint: expected a result whose tensors can be found, got a ", type,
      ". Declare visit_tensors() for it (ddp/output_tensors.h), or return the tensors themselves.");
}

}  // namespace ddp::detail
