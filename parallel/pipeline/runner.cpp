#include "pipeline/runner.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <ddp/internal/call_log.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

const char* name_of(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::GPipe:
      return "GPipe";
    case PipelineSchedule::OneFOneB:
      return "OneFOneB";
    case PipelineSchedule::Interleaved:
      return "Interleaved";
  }
  return "another";
}

void check_setup(const PipelineSetup& setup, int index, int ranks) {
  const auto where = setup.on_rank();
  const auto& options = setup.options;
  DDP_CHECK_VALUE(
      ranks == setup.group->getSize() && index == setup.group->getRank(),
      "PipelineStage: expected a stage for each rank of process_group, got stage ", index, " of ",
      ranks, " ", where,
      ". Pass the axis of the stages: mesh.group(\"pp\") and mesh.rank(\"pp\").");
  const auto is_empty = [](const detail::StageModule& chunk) { return chunk.module == nullptr; };
  DDP_CHECK_VALUE(
      !setup.chunks.empty() && std::none_of(setup.chunks.begin(), setup.chunks.end(), is_empty),
      "PipelineStage: expected a module, or several chunks, got an empty one ", where,
      ". Give each rank its layers.");
  DDP_CHECK_VALUE(
      options.microbatches() >= 1, "PipelineStage: expected microbatches of at least 1, got ",
      options.microbatches(), " ", where, ".");
  DDP_CHECK_VALUE(
      options.schedule() != PipelineSchedule::OneFOneB || setup.chunks.size() == 1,
      "PipelineStage: expected one module a rank with PipelineSchedule::OneFOneB, got ",
      setup.chunks.size(), " chunks ", where, ". Choose Interleaved, or GPipe.");
  DDP_CHECK_VALUE(
      !options.reduce_each() ||
          std::all_of(
              setup.chunks.begin(), setup.chunks.end(),
              [](const detail::StageModule& chunk) { return chunk.may_reduce_each(); }),
      "PipelineStage: expected Reduction::Mean of a DistributedDataParallel with reduce_each, got "
      "another one ",
      where, ", which would add up what was added up before. Leave reduce_each out.");
  DDP_CHECK_VALUE(
      setup.loss || index + 1 < ranks,
      "PipelineStage: expected a loss function on the last stage, got none ", where, ".");
}

/// The settings that all ranks must have alike, a line each.
std::string settings_of(const PipelineSetup& setup) {
  return ddp::str(
      "microbatches ", setup.options.microbatches(), "\nschedule ",
      name_of(setup.options.schedule()), "\nchunks ", setup.chunks.size(), "\ndynamic_shapes ",
      setup.options.dynamic_shapes() ? "true" : "false");
}

std::string describe_settings(const std::vector<std::string>& by_rank) {
  const auto rank = first_different_rank(by_rank);
  if (rank == 0) return "";
  const auto [first, other] = different_lines(by_rank[0], by_rank[rank]);
  return ddp::str(
      "PipelineStage: expected the same options on every rank, got ", first, " on rank 0 and ",
      other, " on rank ", rank, ". Build all stages from one configuration.");
}

/// The messages that the ranks exchange once, by rank.
struct ToldByRanks {
  std::vector<std::string> tied;   // texts of tied parameters
  std::vector<std::string> names;  // as of PipelineSetup::ranks
  bool on_streams = false;         // the messages of any stage
};

std::vector<PipelineStep> forwards_of(const std::vector<PipelineStep>& steps) {
  std::vector<PipelineStep> forwards;
  std::copy_if(
      steps.begin(), steps.end(), std::back_inserter(forwards),
      [](const PipelineStep& step) { return step.action.kind == 'F'; });
  return forwards;
}

/// Adds the batches of messages to a rank's lists: they follow from the lists of all ranks.
void add_batches(
    PipelineSchedule schedule, const PipelineShape& shape, int64_t rank, PipelineList& all,
    PipelineList& forwards) {
  std::vector<std::vector<PipelineStep>> lists, lists_of_forwards;
  for (int64_t r = 0; r < shape.ranks; ++r) {
    lists.push_back(pipeline_steps(pipeline_actions(schedule, shape, r), shape, r));
    lists_of_forwards.push_back(forwards_of(lists.back()));
  }
  all.batches = pipeline_batches(shape, lists, rank);
  forwards.batches = pipeline_batches(shape, lists_of_forwards, rank);
}

/// Throws on every rank where stages do not fit together.
ToldByRanks agree_on_stages(
    const PipelineSetup& setup, const std::string& problem, const TiedParameters& tied,
    bool on_streams) {
  ToldByRanks told;
  const auto describe = [&](const std::vector<std::string>& by_rank) -> std::string {
    std::vector<std::string> settings;
    told = {};
    for (const auto& text : by_rank) {
      const auto texts = unpacked(text);
      if (!texts[0].empty()) return texts[0];
      settings.push_back(texts[1]);
      told.tied.push_back(texts[2]);
      told.names.push_back(texts[3]);
      if (!texts[4].empty()) told.on_streams = true;
    }
    const auto text = describe_settings(settings);
    return text.empty() ? problem_of_tied(told.tied) : text;
  };
  agree(
      packed(
          {problem, settings_of(setup), tied.text(), setup.monitor->rank_text(),
           on_streams ? "streams" : ""}),
      setup.group, "comparing the stages of a pipeline", describe, setup.monitor.get());
  return told;
}

/// The gradients of earlier steps, which are sums over ranks already, kept out of a step whose
/// reductions would sum them once more.
class EarlierGradients {
 public:
  /// Takes the gradients from the parameters. Copies them.
  explicit EarlierGradients(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters_) {
      auto& gradient = parameter.mutable_grad();
      // A copy, because a wrapper may write the step's gradient into the same memory.
      gradients_.push_back(gradient.defined() ? gradient.clone() : gradient);
      gradient.reset();
    }
  }

  void add() const {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& gradient = parameters_[i].mutable_grad();
      if (!gradient.defined()) {
        gradient = gradients_[i];
      } else if (gradients_[i].defined()) {
        gradient.add_(gradients_[i]);
      }
    }
  }

 private:
  std::vector<at::Tensor> parameters_, gradients_;
};

}  // namespace

PipelineRunner::PipelineRunner(
    std::vector<detail::StageModule> chunks, int index, int ranks, LossFn loss,
    const PipelineOptions& options) {
  setup_.group = options.process_group().get();
  setup_.monitor = monitor_of(setup_.group);
  setup_.shape = {ranks, static_cast<int64_t>(chunks.size()), options.microbatches()};
  setup_.rank = index;
  setup_.chunks = std::move(chunks);
  setup_.loss = std::move(loss);
  setup_.options = options;
  setup_.usable.resize(setup_.chunks.size());
  at::Device device = at::kCPU;
  const auto problem = problem_of([&] {
    check_setup(setup_, index, ranks);
    tied_ = TiedParameters(options.tied(), setup_.chunks, setup_.shape, index);
    device = device_of_chunks(setup_.chunks);
  });
  auto told = agree_on_stages(setup_, problem, tied_, has_streams(*setup_.group, device));
  setup_.ranks = std::move(told.names);
  tied_.begin(told.tied, setup_.group, places_);
  for (size_t c = 0; c < setup_.chunks.size(); ++c) {
    const auto& module = *setup_.chunks[c].module;
    const StagePlace place{setup_.shape.stage_of(index, static_cast<int64_t>(c)), setup_.group, {}};
    for (const auto& parameter : module.parameters()) places_.add(parameter, place);
    for (const auto& buffer : module.buffers()) {
      if (buffer.defined()) places_.add(buffer, place);
    }
  }
  actions_ = pipeline_actions(options.schedule(), setup_.shape, index);
  all_.steps = pipeline_steps(actions_, setup_.shape, index);
  forwards_.steps = forwards_of(all_.steps);
  if (!told.on_streams) return;
  setup_.messages = MessageGroups(
      setup_.group, *setup_.monitor, setup_.shape, stream_device(*setup_.group, device));
  add_batches(options.schedule(), setup_.shape, index, all_, forwards_);
}

PipelineResult PipelineRunner::step(
    const std::vector<at::Tensor>& inputs, const at::Tensor& target) {
  const c10::AutoGradMode with_gradients(true);
  std::vector<const torch::nn::Module*> modules;
  for (const auto& chunk : setup_.chunks) modules.push_back(chunk.module.get());
  log_forward<torch::nn::Module>(modules);
  const EarlierGradients earlier(summed_parameters());
  PipelineResult result;
  {
    // Wrappers' units are sharded again at its end.
    PipelinePass pass(setup_, /*trains=*/true, inputs, target);
    result = pass.run(all_);
    add_stats(pass.times());
  }
  tied_.sum_gradients(*setup_.monitor);
  earlier.add();
  return result;
}

std::vector<at::Tensor> PipelineRunner::summed_parameters() const {
  auto summed = tied_.parameters();
  for (const auto& chunk : setup_.chunks) {
    if (chunk.may_reduce_each()) continue;
    for (const auto& parameter : chunk.module->parameters()) summed.push_back(parameter);
  }
  return summed;
}

void PipelineRunner::add_stats(QueuedStep step) {
  // A host is not that far ahead of its device, if somebody looks at results.
  constexpr size_t kMostQueued = 8;
  step.times.step = ++steps_done_;
  if (queued_.size() == kMostQueued) queued_.pop_front();
  queued_.push_back(std::move(step));
  // With events: one look at a step that was queued before the last one.
  if (!queued_.back().events || queued_.size() > 2) take_times();
}

void PipelineRunner::take_times() {
  constexpr size_t kMostSteps = 128;
  for (; !queued_.empty(); queued_.pop_front()) {
    auto& [times, events] = queued_.front();
    if (events && !events->has_ended()) return;
    if (events) events->fill(times);
    if (stats_.steps.size() == kMostSteps) stats_.steps.erase(stats_.steps.begin());
    stats_.steps.push_back(std::move(times));
  }
}

const PipelineStats& PipelineRunner::stats() {
  take_times();
  return stats_;
}

at::Tensor PipelineRunner::eval(const std::vector<at::Tensor>& inputs) {
  const c10::AutoGradMode without_gradients(false);
  return PipelinePass(setup_, /*trains=*/false, inputs, at::Tensor()).run(forwards_).output;
}

PipelineStageBase::PipelineStageBase(
    std::vector<detail::StageModule> chunks, int index, int ranks, LossFn loss,
    const PipelineOptions& options)
    : torch::nn::Module("PipelineStage"),
      runner_(std::make_shared<PipelineRunner>(
          std::move(chunks), index, ranks, std::move(loss), options)) {
  for (size_t c = 0; c < runner_->chunks().size(); ++c) {
    register_module(ddp::str(c), runner_->chunks()[c].module);
  }
}

PipelineStageBase::PipelineStageBase(
    std::vector<detail::StageModule> chunks, LossFn loss, const PipelineOptions& options)
    : PipelineStageBase(
          std::move(chunks), options.process_group().get()->getRank(),
          options.process_group().get()->getSize(), std::move(loss), options) {}

PipelineStageBase::~PipelineStageBase() = default;

PipelineResult PipelineStageBase::step(
    const std::vector<at::Tensor>& inputs, const at::Tensor& target) {
  const auto runner = runner_;
  return runner->step(inputs, target);
}

at::Tensor PipelineStageBase::eval(const std::vector<at::Tensor>& inputs) {
  const auto runner = runner_;
  return runner->eval(inputs);
}

const PipelineStats& PipelineStageBase::stats() const { return runner_->stats(); }

std::vector<PipelineAction> PipelineStageBase::schedule() const { return runner_->actions(); }

std::vector<ParameterLayout> PipelineStageBase::layouts() {
  std::vector<ParameterLayout> layouts;
  for (const auto& chunk : runner_->chunks()) {
    for (auto& layout : layouts_of(*chunk.module)) layouts.push_back(std::move(layout));
  }
  return layouts;
}

}  // namespace ddp
