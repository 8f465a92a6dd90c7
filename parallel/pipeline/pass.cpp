#include "pipeline/pass.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

namespace ddp {
namespace {

/// Calls what the program gave. An exception of its own is this rank's: the monitor need not look
/// for a peer that caused it.
template <typename Call>
auto call_program(const Call& call) {
  try {
    return call();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    DDP_CHECK(false, text_of(error));
  }
}

at::Tensor leaf_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.detach().requires_grad_(c10::GradMode::is_enabled() && tensor.requires_grad());
}

/// A tensor without elements at the same place of the graph.
at::Tensor graph_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return at::Tensor();
  auto graph = at::empty({0}, tensor.options());
  torch::autograd::impl::set_gradient_edge(graph, torch::autograd::impl::gradient_edge(tensor));
  return graph;
}

/// A stage without parameters gets its tensors where the others have theirs.
at::Device device_of_messages(const PipelineSetup& setup) {
  const auto own = device_of_chunks(setup.chunks);
  return setup.messages.are_on_streams() ? stream_device(*setup.group, own) : own;
}

}  // namespace

at::Device device_of_chunks(const std::vector<detail::StageModule>& chunks) {
  for (const auto& chunk : chunks) {
    const auto parameters = chunk.module->parameters();
    if (!parameters.empty()) return parameters.front().device();
  }
  for (const auto& chunk : chunks) {
    for (const auto& buffer : chunk.module->buffers()) {
      if (buffer.defined()) return buffer.device();
    }
  }
  return at::kCPU;
}

std::string PipelineSetup::on_rank() const { return on_rank_text(*group); }

StageChunk::StageChunk(const detail::StageModule& module, int64_t backwards, bool reduces_each)
    : module_(module),
      reduces_each_(reduces_each),
      backwards_left_(backwards),
      use_(*module.module) {}

std::optional<StageChunk::Tensors> StageChunk::forward(int64_t microbatch, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(leaf_of(input));
  if (backwards_left_ > 0) kept_[microbatch].inputs = leaves;
  return module_.forward(leaves);
}

void StageChunk::keep_graph(int64_t microbatch, const Tensors& outputs) {
  auto& kept = kept_[microbatch];
  for (const auto& output : outputs) {
    kept.outputs.push_back(graph_of(output));
    kept.sizes.push_back(output.defined() ? output.sizes().vec() : std::vector<int64_t>());
  }
}

// The other replicas reduce, even if no gradient arrives here.
void StageChunk::sync(const Kept& kept, Tensors& gradients) {
  for (size_t k = 0; k < gradients.size(); ++k) {
    const auto& output = kept.outputs[k];
    if (output.defined() && !gradients[k].defined()) {
      gradients[k] = at::zeros(kept.sizes[k], output.options().requires_grad(false));
    }
  }
  module_.sync_in_backward(kept.outputs);
}

StageChunk::Tensors StageChunk::backward(int64_t microbatch, const Tensors& gradients) {
  const auto kept = std::move(kept_.at(microbatch));
  kept_.erase(microbatch);
  --backwards_left_;
  auto given = gradients;
  if ((reduces_each_ || backwards_left_ == 0) && module_.reduces()) sync(kept, given);
  Tensors roots, root_gradients;
  for (size_t k = 0; k < given.size(); ++k) {
    if (!given[k].defined() || !kept.outputs.at(k).defined()) continue;
    roots.push_back(kept.outputs[k]);
    root_gradients.push_back(given[k]);
  }
  if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
  Tensors of_inputs;
  for (const auto& input : kept.inputs) {
    const auto& gradient = input.defined() ? input.grad() : input;
    of_inputs.push_back(
        gradient.defined() && gradient.is_sparse() ? gradient.to_dense() : gradient);
  }
  return of_inputs;
}

PipelinePass::PipelinePass(
    PipelineSetup& setup, bool trains, const Tensors& inputs, const at::Tensor& target)
    : setup_(setup),
      trains_(trains),
      inputs_(inputs),
      target_(target),
      wire_{
          setup.group,
          setup.messages,
          setup.monitor,
          setup.ranks,
          setup.shape,
          device_of_messages(setup),
          carrier_device(*setup.group),
          {++setup.calls, trains}} {
  DDP_CHECK(
      setup.messages.are_on_streams() || !has_streams(*setup.group, wire_.device) ||
          setup.shape.ranks == 1,
      "PipelineStage: expected stages that were on ", wire_.device.type(),
      " at construction, where the ranks agree on how messages go, got stages that have moved "
      "there ",
      setup.on_rank(), ". Move the modules before they become stages.");
  times_.rank = static_cast<int>(setup.rank);
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  times_.begin_unix_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(since_1970).count();
}

int64_t PipelinePass::stage_of(const PipelineAction& action) const {
  return setup_.shape.stage_of(setup_.rank, action.chunk);
}

std::string PipelinePass::name_of(const PipelineAction& action) const {
  return text_of(action, setup_.shape, setup_.rank);
}

bool PipelinePass::has_stage(int64_t stage) const {
  return stage % setup_.shape.ranks == setup_.rank;
}

StageChunk& PipelinePass::chunk_of(const PipelineAction& action) {
  return *chunks_.at(static_cast<size_t>(action.chunk));
}

PipelineResult PipelinePass::run(const PipelineList& list) {
  auto& monitor = *setup_.monitor;
  monitor.abort_on_error(
      [] { return std::string("cutting a batch into micro-batches"); }, [&] { begin(list); });
  for (at_ = 0; at_ < list.steps.size(); ++at_) {
    const auto& step = list.steps[at_];
    const auto where = [&] { return name_of(step.action); };
    times_.actions.push_back({step.action, stage_of(step.action)});
    monitor.abort_on_error(where, [&] {
      messages_->begin_step(at_);
      step.action.kind == 'F' ? forward(step) : backward(step);
    });
    mark_end();
  }
  times_.total_ms = milliseconds();
  monitor.abort_on_error([] { return std::string("ending a step of a pipeline"); }, [&] { end(); });
  PipelineResult result;
  if (!has_stage(setup_.shape.stages() - 1)) return result;
  result.losses = losses_;
  result.output = joined(outputs_);
  return result;
}

void PipelinePass::mark_begin() {
  times_.actions.back().begin_ms = milliseconds();
  if (events_) events_->record();
}

void PipelinePass::mark_end() {
  times_.actions.back().end_ms = milliseconds();
  if (events_) events_->record();
}

double PipelinePass::milliseconds() const {
  const std::chrono::duration<double, std::milli> since = std::chrono::steady_clock::now() - begin_;
  return since.count();
}

void PipelinePass::begin(const PipelineList& list) {
  const auto count = setup_.shape.microbatches;
  for (const auto& chunk : setup_.chunks) {
    chunks_.push_back(
        std::make_unique<StageChunk>(chunk, trains_ ? count : 0, setup_.options.reduce_each()));
  }
  if (has_stage(0)) {
    input_parts_ = Microbatches("inputs", inputs_, count, /*fills=*/!trains_, setup_.on_rank());
    for (int64_t i = 0; i < count; ++i) {
      if (input_parts_.is_filler(i)) fillers_.insert(i);
    }
    input_gradients_.resize(static_cast<size_t>(count));
  }
  if (has_stage(setup_.shape.stages() - 1) && trains_) {
    target_parts_ = Microbatches("a target", {target_}, count, /*fills=*/false, setup_.on_rank());
    losses_.resize(static_cast<size_t>(count));
    loss_gradients_.resize(static_cast<size_t>(count));
  }
  begin_messages(list);
}

std::string PipelinePass::batch_text() const {
  std::vector<TensorDescription> tensors;
  for (const auto& tensor : inputs_) tensors.push_back(description_of(tensor));
  std::string requires_grad;
  for (const auto& tensor : tensors) requires_grad += tensor.requires_grad ? '1' : '0';
  const auto device = wire_.device.type();
  const bool is_autocast = at::autocast::is_autocast_enabled(device);
  return ddp::str(
      trains_, setup_.chunks.front().module->is_training(), requires_grad, " ", text_of(tensors),
      is_autocast ? ddp::str(" ", at::autocast::get_autocast_dtype(device)) : "");
}

void PipelinePass::begin_messages(const PipelineList& list) {
  if (!setup_.messages.are_on_streams()) {
    messages_ = std::make_unique<HostMessages>(wire_, list.steps);
    return;
  }
  std::optional<std::string> batch;
  if (has_stage(0)) batch = setup_.options.dynamic_shapes() ? "" : batch_text();
  messages_ = std::make_unique<StreamedMessages>(wire_, list, setup_.known, batch);
  if (trains_ && !wire_.device.is_cpu()) events_ = std::make_shared<ActionEvents>(wire_.device);
}

PipelinePass::Tensors PipelinePass::receive(const PipelineStep& step) {
  const auto& action = step.action;
  if (!step.receive) {
    return std::move(handed_.extract({action.kind, stage_of(action), action.microbatch}).mapped());
  }
  auto received = messages_->take(at_, [&] { return name_of(action); });
  if (received.header.is_filler) fillers_.insert(action.microbatch);
  for (size_t k = 0; k < received.tensors.size(); ++k) {
    if (received.header.tensors[k].requires_grad) received.tensors[k].requires_grad_();
  }
  return received.tensors;
}

void PipelinePass::send(const PipelineStep& step, const Tensors& tensors) {
  const auto& action = step.action;
  const auto stage = stage_of(action);
  if (step.send) return messages_->send(at_, tensors, is_filler(action));
  const auto to = action.kind == 'F' ? stage + 1 : stage - 1;
  handed_[{action.kind, to, action.microbatch}] = tensors;
}

void PipelinePass::explain(
    const PipelineAction& action, const Tensors& inputs, const std::string& error) const {
  const auto stage = stage_of(action);
  DDP_CHECK(stage > 0, error);
  StageMessageHeader header{'F', stage - 1, action.microbatch};
  for (const auto& input : inputs) header.tensors.push_back(description_of(input));
  auto usable = setup_.usable[static_cast<size_t>(action.chunk)];
  DDP_CHECK(
      !usable.empty() && differ_in_width(usable, header.tensors), error, "\nForward got ",
      text_of(header.tensors), " from stage ", stage - 1, ".");
  for (size_t k = 0; k < std::min(usable.size(), inputs.size()); ++k) {
    const auto& sizes = header.tensors[k].sizes;
    if (!usable[k].sizes.empty() && !sizes.empty()) usable[k].sizes[0] = sizes[0];
  }
  DDP_CHECK(
      false, text_of_width_error(usable, header, setup_.on_rank()), " Forward threw: ", error);
}

PipelinePass::Tensors PipelinePass::run_forward(const PipelineStep& step, const Tensors& inputs) {
  const auto& action = step.action;
  std::optional<Tensors> outputs;
  try {
    outputs = chunk_of(action).forward(action.microbatch, inputs);
    DDP_CHECK(
        outputs, "PipelineStage: expected a forward of stage ", stage_of(action), " that takes ",
        inputs.size(), inputs.size() == 1 ? " tensor" : " tensors", ", got one that does not ",
        setup_.on_rank(), ". It takes as many as the stage before returns, or a std::vector.");
  } catch (const c10::DistError&) {
    throw;  // of a collective in forward: the monitor looks for its cause
  } catch (const std::exception& error) {
    explain(action, inputs, text_of(error));
  }
  auto& usable = setup_.usable[static_cast<size_t>(action.chunk)];
  usable.clear();
  for (const auto& input : inputs) usable.push_back(description_of(input));
  return std::move(*outputs);
}

void PipelinePass::forward(const PipelineStep& step) {
  const auto& action = step.action;
  const auto stage = stage_of(action);
  const auto inputs = stage == 0 ? input_parts_.tensors(action.microbatch) : receive(step);
  mark_begin();
  const auto outputs = run_forward(step, inputs);
  if (is_last(stage)) {
    DDP_CHECK(
        outputs.size() == 1 && outputs[0].defined(),
        "PipelineStage: expected one tensor of the last stage, got ", outputs.size(), " ",
        setup_.on_rank(), ". Join them, or compute the loss in forward and return it in loss.");
    // The last stage's forwards are in the order of micro-batches.
    if (!is_filler(action)) outputs_.push_back(outputs[0].detach());
    if (trains_) add_loss(action, outputs[0]);
    return;
  }
  send(step, outputs);
  if (trains_) chunk_of(action).keep_graph(action.microbatch, outputs);
}

void PipelinePass::add_loss(const PipelineAction& action, const at::Tensor& output) {
  const auto at = static_cast<size_t>(action.microbatch);
  const auto target = target_parts_.tensors(action.microbatch)[0];
  auto loss = call_program([&] { return setup_.loss(output, target); });
  DDP_CHECK(
      loss.defined() && loss.numel() == 1, "PipelineStage: expected a loss of one element, got ",
      loss.defined() ? ddp::str(loss.sizes()) : "none", " ", setup_.on_rank(),
      ". Reduce it: mean() or sum().");
  losses_[at] = loss.detach();
  // Before backward, because gradients of several steps add up.
  if (setup_.options.scale_grads()) loss = loss * target_parts_.share(action.microbatch);
  if (const auto& scale = setup_.options.scale_loss()) {
    loss = call_program([&] { return scale(loss); });
  }
  loss_gradients_[at] = at::ones_like(loss.detach());
  chunk_of(action).keep_graph(action.microbatch, {loss});
}

void PipelinePass::backward(const PipelineStep& step) {
  const auto& action = step.action;
  const auto stage = stage_of(action);
  const auto at = static_cast<size_t>(action.microbatch);
  Tensors gradients;
  if (is_last(stage)) {
    gradients = {loss_gradients_[at]};
  } else {
    gradients = receive(step);
    // The next stage has computed with the activations, so they have arrived.
    messages_->finish({'F', action.chunk, action.microbatch});
  }
  mark_begin();
  auto of_inputs =
      call_program([&] { return chunk_of(action).backward(action.microbatch, gradients); });
  if (stage == 0) {
    input_gradients_[at] = std::move(of_inputs);
  } else {
    send(step, of_inputs);
  }
}

void PipelinePass::end() {
  messages_->finish_all();
  if (!trains_ || !has_stage(0)) return;
  std::vector<Tensors> parts;
  for (int64_t i = 0; i < setup_.shape.microbatches; ++i) parts.push_back(input_parts_.tensors(i));
  call_program([&] { backward_through(inputs_, parts, input_gradients_); });
}

}  // namespace ddp
