// One process, in double, with LibTorch alone: each rank's rows go through a copy of the model;
// layers that see all ranks get them together. A step's gradient is the sum over ranks of weight x
// gradient of the rank's loss, which reaches all copies.
#include <algorithm>
#include <numeric>

#include <ATen/autocast_mode.h>

#include "differential/rounding.h"
#include "differential/stream.h"

namespace ddp::differential {
namespace {

/// A copy of the model for each rank.
class Copies {
 public:
  Copies(const Program& program, Noise& noise)
      : program_(program),
        precision_(precision_of(program)),
        noise_(noise),
        labels_(program.layers()) {}

  struct Copy {
    std::shared_ptr<Net> net = std::make_shared<Net>();
    std::vector<std::shared_ptr<Layer>> layers;
  };
  Copy make() const {
    Copy result;
    for (size_t i = 0; i < labels_.size(); ++i) {
      const auto& kind = layer_kinds().at(labels_[i]);
      result.layers.push_back(kind.alone ? kind.alone() : kind.make({}, result.layers));
      result.net->add(layer_name(i), result.layers.back());
    }
    result.net->to(precision_.module);
    return result;
  }

  void set_ranks(int ranks) {
    while (static_cast<int>(nets_.size()) < ranks) {
      auto [net, layers] = make();
      if (program_.has("tied_table"))
        net->register_module("table", tables_.emplace_back(std::make_shared<Table>()));
      net->to(precision_.module);
      set_values(*net, 1);
      if (!tables_.empty()) tables_.back()->weight.set_data(values(5, {4, 4}));
      if (!nets_.empty()) copy(*nets_[0], *net);
      for (auto& buffer : net->buffers()) {
        if (precision_.buffers && buffer.is_floating_point())
          buffer.set_data(buffer.to(*precision_.buffers));
      }
      nets_.push_back(net);
      layers_.push_back(layers);
    }
    nets_.resize(static_cast<size_t>(ranks));
    layers_.resize(static_cast<size_t>(ranks));
    tables_.resize(program_.has("tied_table") ? static_cast<size_t>(ranks) : 0);
  }

  OfRanks forward(const OfRanks& inputs, int step) {
    auto x = inputs;
    auto all = layers_;
    if (precision_.of_forward > 0) all = cast_copies();
    for (auto& own : x) {
      if (precision_.casts_inputs) own = own.to(precision_.forward);
    }
    for (size_t rank = 0; rank < tables_.size(); ++rank)
      x[rank] = x[rank].matmul(tables_[rank]->weight);
    for (size_t i = 0; i < labels_.size(); ++i) {
      std::vector<std::shared_ptr<Layer>> copies;
      for (size_t rank = 0; rank < nets_.size(); ++rank) {
        copies.push_back(all[rank][i]);
        copies.back()->used = uses_sometimes(program_, step, static_cast<int>(rank));
      }
      const auto& kind = layer_kinds().at(labels_[i]);
      if (kind.together) {
        x = kind.together(copies, x);
      } else {
        for (size_t rank = 0; rank < x.size(); ++rank) x[rank] = copies[rank]->forward(x[rank]);
      }
    }
    for (size_t rank = 0; rank < tables_.size(); ++rank)
      x[rank] = x[rank].matmul(tables_[rank]->weight.t());
    return x;
  }

  std::vector<at::Tensor> parameters(size_t rank) const {
    return unique(nets_[rank]->parameters());
  }
  Net& net(size_t rank = 0) { return *nets_[rank]; }
  size_t size() const { return nets_.size(); }
  std::vector<std::shared_ptr<Layer>>& layers(size_t rank) { return layers_[rank]; }

  /// Copies in other dtypes that forward passes have used, by rank.
  std::vector<std::pair<size_t, std::vector<at::Tensor>>> cast;

  /// Copies parameters and, if asked, buffers of one copy to another.
  static void copy(Net& from, Net& to, bool buffers = true) {
    const torch::NoGradGuard no_grad;
    for (const auto& item : from.named_parameters())
      to.named_parameters()[item.key()].copy_(item.value());
    if (!buffers) return;
    for (const auto& item : from.named_buffers())
      to.named_buffers()[item.key()].copy_(item.value());
  }

 private:
  /// The layers of copies whose parameters are cast for a forward pass; buffers are the same.
  std::vector<std::vector<std::shared_ptr<Layer>>> cast_copies() {
    std::vector<std::vector<std::shared_ptr<Layer>>> result;
    for (size_t rank = 0; rank < nets_.size(); ++rank) {
      const auto copy = make();
      copy.net->train(nets_[rank]->is_training());
      for (size_t i = 0; i < labels_.size(); ++i) {
        if (!keeps_dtype(program_, labels_[i])) cast_parameters(*copy.layers[i]);
      }
      const auto from = nets_[rank]->parameters(), to = copy.net->parameters();
      for (size_t i = 0; i < to.size(); ++i) {
        const torch::NoGradGuard no_grad;
        to[i].copy_(from[i]);
        noise_.add(to[i], precision_.of_forward);
        to[i].set_requires_grad(from[i].requires_grad());
      }
      for (auto& item : copy.net->named_buffers())
        item.value().set_data(nets_[rank]->named_buffers()[item.key()]);
      cast.emplace_back(rank, unique(to));
      result.push_back(copy.layers);
    }
    return result;
  }
  void cast_parameters(Layer& layer) const {
    for (auto& p : layer.parameters()) {
      if (p.is_floating_point()) p.set_data(p.detach().to(precision_.forward));
    }
  }

  const Program& program_;
  const Precision precision_;
  Noise& noise_;
  std::vector<std::string> labels_;
  std::vector<std::shared_ptr<Net>> nets_;
  std::vector<std::vector<std::shared_ptr<Layer>>> layers_;
  std::vector<std::shared_ptr<Table>> tables_;
};

class Reference {
 public:
  Reference(const Program& program, uint64_t noise)
      : program_(program),
        precision_(precision_of(program)),
        noise_(noise),
        copies_(program, noise_),
        averages_(program, noise_) {}

  std::vector<Record> run() {
    copies_.set_ranks(axes_of(program_, 0).dp);
    averages_.begin(of_all());
    for (size_t rank = 0; rank < steppers(); ++rank) {
      const auto parameters = copies_.parameters(rank);
      optimizers_.push_back(make_optimizer(
          program_.label("optimizer"), param_groups(program_, taken_by(program_, parameters), 0)));
      seconds_.push_back(make_second(taken_by(program_, parameters, /*second=*/true)));
      scales_.push_back(program_.is("precision", "half") ? 64 : 65536);
    }
    for (int step = 0; step < program_.number("steps"); ++step) {
      if (step == reload_step(program_)) copies_.set_ranks(axes_of(program_, step).dp);
      records_.resize(std::max(records_.size(), copies_.size()));
      run_step(step);
      if (step + 1 == program_.number("steps")) {
        averages_.finish(of_all());
        for (size_t rank = 0; rank < copies_.size(); ++rank) note_values("end", rank);
        if (program_.has("average")) note_weights();
      }
      give_to_ranks(step);
    }
    return of_ranks_;
  }

 private:
  /// All ranks of a replica have what it has.
  void give_to_ranks(int step) {
    const auto axes = axes_of(program_, step);
    of_ranks_.resize(std::max(of_ranks_.size(), static_cast<size_t>(ranks_of(program_, step))));
    for (int rank = 0; rank < ranks_of(program_, step); ++rank) {
      const auto& own = records_[static_cast<size_t>(rank / axes.tp % axes.dp)];
      of_ranks_[static_cast<size_t>(rank)].insert(own.begin(), own.end());
    }
    records_.assign(records_.size(), {});
  }

  /// How many copies step: one for all ranks, where these stay equal.
  size_t steppers() const { return drifts(program_) ? copies_.size() : 1; }
  size_t stepper_of(size_t rank) const { return drifts(program_) ? rank : 0; }
  Averages::OfAll of_all() const {
    Averages::OfAll result;
    for (size_t rank = 0; rank < copies_.size(); ++rank) result.push_back(copies_.parameters(rank));
    return result;
  }

  bool active(int step, size_t rank) const {
    return has_input(program_, step, static_cast<int>(rank));
  }

  void run_step(int step) {
    if (step == 1 && reload_step(program_) != 1 && program_.is("change", "summoned")) {
      const torch::NoGradGuard no_grad;
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        for (auto& p : copies_.parameters(rank)) p.mul_(0.5);
      }
    }
    for (auto& optimizer : optimizers_) optimizer->zero_grad();
    for (auto& optimizer : seconds_) optimizer->zero_grad();
    copies_.cast.clear();
    extra_.mutable_grad().reset();
    if (is_frozen(program_, step)) {
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        for (auto& p : copies_.layers(rank)[0]->parameters()) p.set_requires_grad(false);
      }
    }
    samples_.assign(copies_.size(), 0);
    std::map<int, OfRanks> losses;  // by batch
    const auto passes = passes_of(program_);
    const auto forward_of = [&](int batch) { losses[batch] = forward(step, batch); };
    if (forwards_come_first(program_)) {
      for (const auto& pass : passes)
        std::for_each(pass.batches.begin(), pass.batches.end(), forward_of);
    }
    OfRanks waiting(copies_.size());  // sums of losses since the last averaged pass
    for (const auto& pass : passes) {
      if (!forwards_come_first(program_) && !pass.again) {
        std::for_each(pass.batches.begin(), pass.batches.end(), forward_of);
      }
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        for (const int batch : pass.batches) {
          if (!active(step, rank)) continue;
          const auto& loss = losses[batch][rank];
          waiting[rank] = waiting[rank].defined() ? waiting[rank] + loss : loss;
          counted_[rank] += rows_of(program_, step, batch)[rank];
        }
      }
      if (pass.averaged) average(step, waiting);
    }
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      if (active(step, rank) && is_finite(rank)) note_gradients(step, rank);
    }
    for (size_t rank = 0; rank < steppers(); ++rank) take_step(step, rank);
    for (size_t rank = 1; rank < copies_.size() && !drifts(program_); ++rank)
      Copies::copy(copies_.net(), copies_.net(rank), false);
    if (program_.is("training", "averager|diloco")) averages_.after_step(step, of_all());
    if (program_.has("average")) average_weights();
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      if (active(step, rank)) note_values(std::to_string(step), rank);
      if (!program_.has("drawing")) continue;
      torch::manual_seed(17 + rank);
      note(records_[rank], std::to_string(step) + " drawn", torch::rand({8}, torch::kDouble));
    }
  }

  /// Whether a rank's gradients let it step.
  bool is_finite(size_t rank) const {
    if (!program_.has("scaler")) return true;
    for (const auto& p : copies_.parameters(stepper_of(rank))) {
      if (p.grad().defined() && !at::isfinite(p.grad()).all().item<bool>()) return false;
    }
    return true;
  }

  void take_step(int step, size_t rank) {
    set_rates_(step, *optimizers_[rank]);
    const auto parameters = copies_.parameters(rank);
    const bool steps = is_finite(rank);
    if (!steps) scales_[rank] /= 2;
    bool clips = true;
    for (size_t other = 0; other < copies_.size(); ++other)
      clips = clips && !overflows(program_, step, static_cast<int>(other));
    // Of stage 2, LibTorch's function finds no gradients, as the documentation says.
    const bool finds_none = program_.is("clip", "torch") && training_of(program_, step) == "zero2";
    if (clips && !finds_none) clip(parameters);
    if (!steps) return;
    optimizers_[rank]->step();
    seconds_[rank]->step();
    for (const auto& p : parameters) noise_.add(p.detach(), precision_.of_parameters);
  }
  void set_rates_(int step, torch::optim::Optimizer& optimizer) {
    if (program_.has("schedule_of_rate")) set_rates(program_, step, optimizer);
  }

  RowsOfBatch rows_of_replica(int step, int batch, int rank, int64_t rows) const {
    if (program_.has("batches")) return batch_of_stream(program_, step, batch, rank);
    const auto seed = data_seed(step, batch, rank);
    return {values(seed, {rows, 4}), values(seed + 5, {rows, 4})};
  }

  /// Losses of all ranks, with graphs.
  OfRanks forward(int step, int batch) {
    std::vector<OfRanks> inputs(1), targets(1);  // of micro-batches
    const auto rows = rows_of(program_, step, batch);
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      const auto own = rows_of_replica(step, batch, static_cast<int>(rank), rows[rank]);
      const auto input = own.x.to(precision_.module), target = own.target;
      const auto parts = is_pipeline(program_, step) ? program_.number("microbatches") : 1;
      inputs.resize(parts), targets.resize(parts);
      for (int64_t i = 0; i < parts; ++i) {
        inputs[i].push_back(input.tensor_split(parts)[i]);
        targets[i].push_back(target.tensor_split(parts)[i]);
      }
    }
    OfRanks losses(copies_.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto own = losses_of(step, inputs[i], targets[i]);
      for (size_t rank = 0; rank < own.size(); ++rank) {
        const double share =
            program_.is("loss", "sum") || inputs.size() == 1
                ? 1
                : static_cast<double>(inputs[i][rank].size(0)) / static_cast<double>(rows[rank]);
        losses[rank] =
            losses[rank].defined() ? losses[rank] + own[rank] * share : own[rank] * share;
      }
    }
    for (size_t rank = 0; rank < losses.size(); ++rank) {
      if (active(step, rank)) {
        note(
            records_[rank], std::to_string(step) + " loss of batch " + std::to_string(batch),
            losses[rank]);
      }
    }
    return losses;
  }

  /// Of one micro-batch.
  OfRanks losses_of(int step, const OfRanks& inputs, const OfRanks& targets) {
    OfRanks penalties(copies_.size());
    const auto penalize = [&] {
      for (size_t rank = 0; rank < penalties.size(); ++rank)
        penalties[rank] = penalty_of(copies_.parameters(rank));
    };
    if (program_.is("penalty", "before")) penalize();
    const bool casts = precision_.autocast;
    if (casts)
      at::autocast::increment_nesting(), at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto restore = keep_buffers_of_inactive(step);
    auto outputs = copies_.forward(inputs, step);
    restore();
    if (casts) {
      at::autocast::set_autocast_enabled(at::kCPU, false);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    }
    for (auto& output : outputs) {
      if (precision_.output) output = output.to(*precision_.output);
    }
    if (program_.is("penalty", "inside|after")) penalize();
    OfRanks losses, sums;
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const auto& penalty = penalties[rank];
      if (program_.is("penalty", "inside")) outputs[rank] = outputs[rank] + penalty;
      auto loss = loss_of(outputs[rank], targets[rank], !program_.is("loss", "sum"));
      if (program_.is("penalty", "before|after")) loss = loss + penalty;
      if (program_.is("also_average", "yes")) loss = loss * (1 + extra_.sum());
      losses.push_back(loss);
      sums.push_back(outputs[rank].sum(0));
    }
    if (program_.is("loss", "gathered")) {
      const auto all = torch::stack(sums);
      for (size_t rank = 0; rank < losses.size(); ++rank) {
        losses[rank] = losses[rank] + (all * sums[rank]).sum() / 8;
      }
    }
    return losses;
  }

  /// Ranks without input run no forward pass that others could see.
  std::function<void()> keep_buffers_of_inactive(int step) {
    std::vector<std::pair<at::Tensor, at::Tensor>> kept;
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      if (active(step, rank)) continue;
      for (const auto& buffer : copies_.net(rank).buffers())
        kept.emplace_back(buffer, buffer.detach().clone());
    }
    return [kept] {
      for (const auto& [buffer, value] : kept) buffer.set_data(value);
    };
  }

  std::vector<double> weights(int step) {
    std::vector<double> result;
    const auto regions = regions_of(program_, step);
    double active_ranks = 0, all = 0;
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      active_ranks += active(step, rank) ? 1 : 0;
      all += static_cast<double>(samples_[rank]);
    }
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      const auto size =
          static_cast<double>(std::count(regions.begin(), regions.end(), regions[rank]));
      double weight = 1 / (program_.is("join", "by_active") ? active_ranks : size);
      if (program_.is("reduction", "Sum")) weight = 1;
      if (program_.is("reduction", "SampleWeighted")) {
        weight = all > 0 ? static_cast<double>(samples_[rank]) / all : 0;
      }
      result.push_back(weight);
    }
    return result;
  }

  /// Adds the gradients of the weighted losses, and clears them.
  void average(int step, OfRanks& waiting) {
    if (std::any_of(counted_.begin(), counted_.end(), [](auto n) { return n.second > 0; })) {
      for (size_t rank = 0; rank < copies_.size(); ++rank) samples_[rank] = counted_[rank];
    } else {
      samples_.assign(copies_.size(), 0);
    }
    counted_.clear();
    const auto weight = weights(step);
    at::Tensor total;
    for (size_t rank = 0; rank < waiting.size(); ++rank) {
      if (!waiting[rank].defined()) continue;
      auto weighted = waiting[rank] * weight[rank];
      if (program_.has("scaler")) weighted = weighted * scales_[stepper_of(rank)];
      if (overflows(program_, step, static_cast<int>(rank))) weighted = weighted * 1e306;
      total = total.defined() ? total + weighted : weighted;
      waiting[rank] = at::Tensor();
    }
    std::vector<at::Tensor> leaves;
    std::vector<std::pair<size_t, size_t>> of;  // the rank of each leaf, and its parameter's number
    const auto add = [&](size_t rank, const std::vector<at::Tensor>& parameters) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad())
          leaves.push_back(parameters[i]), of.emplace_back(rank, i);
      }
    };
    for (size_t rank = 0; rank < copies_.size(); ++rank) add(rank, copies_.parameters(rank));
    for (const auto& [rank, parameters] : copies_.cast) add(rank, parameters);
    leaves.push_back(extra_);
    const auto gradients =
        torch::autograd::grad({total}, leaves, {}, /*retain_graph=*/true, false, true);
    double largest = 1;  // rounding errors of a small gradient are those of larger ones
    for (const auto& g : gradients) {
      if (g.defined() && g.numel() > 0)
        largest = std::max(largest, g.to_dense().abs().max().to(torch::kDouble).item<double>());
    }
    if (!std::isfinite(largest)) largest = 1;
    const double least = std::max(precision_.least, 4 * kOfDouble * largest);
    const auto regions = regions_of(program_, step);
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (i == of.size()) {
        const auto own = gradients[i].clone();
        noise_.add(own, precision_.of_gradients, least);
        extra_.mutable_grad() = extra_.grad().defined() ? extra_.grad() + own : own;
        break;
      }
      const auto [rank, number] = of[i];
      for (size_t other = 0; other < steppers(); ++other) {
        if (regions[other] != regions[rank]) continue;
        const auto parameter = copies_.parameters(other)[number];
        auto own = gradients[i].to_dense().to(parameter.scalar_type(), false, /*copy=*/true);
        noise_.add(own, precision_.of_gradients, least);
        if (program_.has("scaler")) own /= scales_[stepper_of(other)];
        auto& gradient = parameter.mutable_grad();
        gradient = gradient.defined() ? gradient + own : own;
      }
    }
    if (program_.is("buffers_of", "rank_0|rank_0_later")) {
      size_t last = 0;
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        if (program_.is("join", "default|by_active|optimizers") && active(step, rank)) last = rank;
      }
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        const auto source = last > 0 ? last : source_of_buffers(program_, rank);
        if (rank == source) continue;
        const torch::NoGradGuard no_grad;
        for (const auto& item : copies_.net(source).named_buffers()) {
          copies_.net(rank).named_buffers()[item.key()].set_data(item.value().clone());
        }
      }
    }
  }

  void clip(const std::vector<at::Tensor>& parameters) {
    const auto& label = program_.label("clip");
    if (label == "2") torch::nn::utils::clip_grad_norm_(parameters, 0.5);
    // Below the norm of any part, so that ranks do not clip alike.
    if (label == "torch") torch::nn::utils::clip_grad_norm_(parameters, 1e-3);
    if (label == "1") torch::nn::utils::clip_grad_norm_(parameters, 0.5, 1);
    if (label == "inf") torch::nn::utils::clip_grad_norm_(parameters, 0.5, INFINITY);
    if (label == "value") torch::nn::utils::clip_grad_value_(parameters, 0.1);
  }

  void note_gradients(int step, size_t rank) {
    if (extra_.grad().defined())
      note(records_[rank], std::to_string(step) + " gradient of extra", extra_.grad());
    for (const auto& item : copies_.net(stepper_of(rank)).named_parameters()) {
      note(
          records_[rank], std::to_string(step) + " gradient of " + item.key(), item.value().grad());
    }
  }
  void note_values(const std::string& when, size_t rank) {
    for (const auto& item : copies_.net(stepper_of(rank)).named_parameters()) {
      note(records_[rank], when + " parameter " + item.key(), item.value());
    }
    for (const auto& item : copies_.net(rank).named_buffers()) {
      note(records_[rank], when + " buffer " + item.key(), item.value());
    }
  }

  /// By the definitions of the means.
  void average_weights() {
    const torch::NoGradGuard no_grad;
    weights_.resize(steppers());
    const auto n = static_cast<double>(updates_++);
    double share = 0.25;  // of the new values
    if (program_.is("average", "mean")) share = 1 / (n + 1);
    if (program_.is("average", "warmup")) share = 1 - std::min(0.9, (1 + n) / (10 + n));
    for (size_t rank = 0; rank < weights_.size(); ++rank) {
      auto& own = weights_[rank];
      const auto parameters = copies_.parameters(rank);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (i == own.size()) own.push_back(parameters[i].detach().clone());
        own[i].add_((parameters[i] - own[i]) * (n == 0 ? 1 : share));
        noise_.add(own[i], precision_.of_parameters);
      }
    }
  }
  void note_weights() {
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      const auto named = copies_.net(stepper_of(rank)).named_parameters();
      const auto parameters = copies_.parameters(stepper_of(rank));
      for (size_t i = 0; i < parameters.size(); ++i) {
        for (const auto& item : named) {
          if (item.value().is_same(parameters[i]))
            note(
                records_[rank], "end with averages parameter " + item.key(),
                weights_[stepper_of(rank)][i]);
        }
      }
    }
  }

  const Program& program_;
  const Precision precision_;
  Noise noise_;
  Copies copies_;
  Averages averages_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_,
      seconds_;  // of each copy that steps
  std::vector<double> scales_;
  std::vector<std::vector<at::Tensor>> weights_;  // averages of the parameters of each copy
  int updates_ = 0;
  at::Tensor extra_ = values(3, {2}).requires_grad_();
  std::map<size_t, int64_t> counted_;  // samples since the last averaged pass
  std::vector<int64_t> samples_;       // of the averaged pass
  std::vector<Record> records_, of_ranks_;
};

}  // namespace

std::vector<Record> reference(const Program& program, uint64_t noise) {
  return Reference(program, noise).run();
}

}  // namespace ddp::differential
