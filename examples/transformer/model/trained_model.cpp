#include "trained_model.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>
#include <ddp/collectives.h>
#include <ddp/full_state_dict.h>
#include <ddp/parameter_layout.h>
#include <torch/utils.h>

#include "../../common/on_all_ranks.h"
#include "../../common/rank_device.h"

namespace transformer {
namespace {

using examples::Tally;

Tally losses_of(const Prediction& prediction) {
  const int64_t characters = prediction.target.size(0);
  return {prediction.loss.item<double>() * static_cast<double>(characters), 0, characters};
}

/// Of a pipeline's losses, one for each part of the characters.
Tally tally_of_parts(const std::vector<at::Tensor>& losses, const at::Tensor& target) {
  Tally tally;
  const auto parts = target.tensor_split(static_cast<int64_t>(losses.size()));
  for (size_t i = 0; i < losses.size(); ++i) {
    const int64_t characters = parts[i].numel();
    tally += {losses[i].item<double>() * static_cast<double>(characters), 0, characters};
  }
  return tally;
}

ddp::PipelineSchedule schedule_of(const Options& options) {
  if (options.schedule == "gpipe") return ddp::PipelineSchedule::GPipe;
  if (options.schedule == "1f1b") return ddp::PipelineSchedule::OneFOneB;
  return ddp::PipelineSchedule::Interleaved;  // "eager": of one stage a rank
}

}  // namespace

TrainedModel::TrainedModel(const Options& options, const Groups& groups, int64_t vocabulary)
    : options_(options), vocabulary_(vocabulary), groups_(groups) {
  for (int64_t chunk = 0; chunk < options.stages_a_rank(); ++chunk) {
    const int64_t stage = chunk * groups.pp_size() + groups.stage;
    torch::manual_seed(static_cast<uint64_t>(options.seed));
    LanguageModel net(
        vocabulary, options.shape, groups, options.fsdp,
        Stage{stage, options.stages_a_rank() * groups.pp_size()});
    if (!options.fsdp) {
      examples::on_all_ranks([&] { net->to(examples::rank_device(options.backend)); });
    }
    wrappers_.push_back(wrap(net));
    nets_.push_back(std::move(net));
  }
  if (groups.pp_size() > 1) {
    pipeline_ = options.fsdp ? make_pipeline<Sharded>() : make_pipeline<Replicated>();
  }
  if (!options.load.empty()) ddp::load_full_state_dict(module(), options.load);
}

TrainedModel::Wrapper TrainedModel::wrap(const LanguageModel& net) const {
  const auto& group = net->groups.data;
  if (options_.fsdp) return Sharded(net, ddp::FullyShardedOptions().process_group(group));
  return Replicated(
      net,
      ddp::DistributedDataParallelOptions().gradient_as_bucket_view(true).process_group(group));
}

template <typename M>
std::unique_ptr<ddp::PipelineStageBase> TrainedModel::make_pipeline() {
  std::vector<M> chunks;
  for (const auto& wrapper : wrappers_) chunks.push_back(std::get<M>(wrapper));
  const auto& last = nets_.back();
  ddp::PipelineOptions options;
  options.process_group(groups().pp)
      .microbatches(options_.microbatches)
      .schedule(schedule_of(options_));
  if (options_.accumulate > 1) {
    options.scale_loss(
        [parts = options_.accumulate](const at::Tensor& loss) { return loss / parts; });
  }
  // The first stage's table is the head of the last one.
  if (groups().ends) {
    const auto& end = nets_.front()->stage.is_first() ? nets_.front() : last;
    options.tied({{end->tokens.weight, groups().ends}});
  }
  return std::make_unique<ddp::PipelineStage<M>>(
      std::move(chunks), static_cast<int>(groups().stage), static_cast<int>(groups().pp_size()),
      [last](const at::Tensor& logits, const at::Tensor& target) {
        return last->loss(logits, target);
      },
      options);
}

void TrainedModel::become_replica(int64_t replica, int64_t replicas) {
  groups_.replica = replica;
  groups_.replicas = replicas;
}

torch::nn::Module& TrainedModel::module() {
  if (pipeline_) return *pipeline_;
  return std::visit(
      [](auto& wrapper) -> torch::nn::Module& { return *wrapper; }, wrappers_.front());
}

int64_t TrainedModel::numel() {
  // The last stage has the first one's table.
  const bool repeats_table = groups().ends && ddp::get_rank(groups().ends) > 0;
  int64_t numel = 0;
  for (const auto& layout : ddp::layouts_of(module())) {
    if (repeats_table && layout.name == "tokens.weight") continue;
    numel += c10::multiply_integers(layout.sizes);
  }
  if (!pipeline_) return numel;
  auto sum = at::full({1}, numel, at::dtype(at::kLong).device(nets_.front()->device()));
  ddp::all_reduce(sum, c10d::ReduceOp::SUM, groups().pp);
  return sum.item<int64_t>();
}

at::Tensor TrainedModel::own_target(const Batch& batch) const {
  return groups().own_positions(batch.target.to(nets_.front()->device())).contiguous();
}

std::vector<at::Tensor> TrainedModel::first_inputs(const at::Tensor& characters) const {
  const auto& net = nets_.front();
  if (!net->stage.is_first()) return {};
  return {characters.to(net->device())};
}

at::Tensor TrainedModel::logits_of(const at::Tensor& characters) {
  if (pipeline_) {
    // Attention takes no empty micro-batch.
    const int64_t rows = characters.size(0);
    const auto enough = at::arange(std::max(rows, options_.microbatches)).remainder(rows);
    const auto logits = pipeline_->eval(first_inputs(characters.index_select(0, enough)));
    return logits.defined() ? logits.narrow(0, 0, rows) : logits;
  }
  const auto inputs = first_inputs(characters);
  return std::visit(
      [&](auto& wrapper) { return wrapper->forward(inputs.front()); }, wrappers_.front());
}

Prediction TrainedModel::prediction_of(const at::Tensor& logits, const Batch& batch) const {
  const auto target = own_target(batch);
  return {logits.flatten(0, 1), target.flatten(), nets_.back()->loss(logits, target)};
}

Tally TrainedModel::backward(const Batch& batch, bool averages) {
  if (pipeline_) return pipelined_backward(batch);
  if (averages || is_sharded()) return own_backward(batch);
  const auto alone = replicated()->no_sync();
  return own_backward(batch);
}

Tally TrainedModel::pipelined_backward(const Batch& batch) {
  const bool is_last = nets_.back()->stage.is_last();
  const auto target = is_last ? own_target(batch) : at::Tensor();
  const auto result = pipeline_->step(first_inputs(batch.input), target);
  return is_last ? tally_of_parts(result.losses, target) : Tally();
}

Tally TrainedModel::own_backward(const Batch& batch) {
  const auto prediction = prediction_of(logits_of(batch.input), batch);
  (prediction.loss / options_.accumulate).backward();
  return losses_of(prediction);
}

std::optional<Prediction> TrainedModel::predict(const Batch& batch) {
  const c10::NoGradGuard no_grad;
  const auto logits = logits_of(batch.input);
  if (!nets_.back()->stage.is_last()) return std::nullopt;
  return prediction_of(logits, batch);
}

Tally TrainedModel::tally_of(const Prediction& prediction) const {
  auto tally = losses_of(prediction);
  const auto logits = whole_vocabulary(prediction.logits, vocabulary_, groups());
  tally.correct = logits.argmax(1).eq(prediction.target).sum().item<int64_t>();
  return tally;
}

at::Tensor TrainedModel::predict_next(const at::Tensor& characters) {
  const c10::NoGradGuard no_grad;
  const auto& net = nets_.back();
  const auto logits = logits_of(net->padded(characters));
  auto next = at::empty({1, vocabulary_}, at::dtype(at::kFloat).device(net->device()));
  if (net->stage.is_last()) next.copy_(net->last_logits(logits, characters.size(1)));
  const auto stages = static_cast<int>(groups().pp_size());
  if (stages > 1) ddp::broadcast(next, stages - 1, groups().pp);
  return next;
}

void TrainedModel::check_replicas() {
  if (is_sharded()) return;
  for (auto& wrapper : wrappers_) std::get<Replicated>(wrapper)->check_replicas();
}

}  // namespace transformer
