// One process, in double, with LibTorch alone: each rank's rows go through a copy of the model; layers that
// see all ranks get them together. A step's gradient is the sum over ranks of weight x gradient of the rank's
// loss, which reaches all copies.
#include <algorithm>
#include <numeric>

#include "differential/plan.h"

namespace ddp::differential {
namespace {

/// A copy of the model for each rank.
class Copies {
 public:
  explicit Copies(const Program& program) : program_(program), labels_(program.layers()) {}

  void set_ranks(int ranks) {
    while (static_cast<int>(nets_.size()) < ranks) {
      auto net = std::make_shared<Net>();
      std::vector<std::shared_ptr<Layer>> layers;
      for (size_t i = 0; i < labels_.size(); ++i) {
        const auto& kind = layer_kinds().at(labels_[i]);
        layers.push_back(kind.alone ? kind.alone() : kind.make({}, layers));
        net->add(layer_name(i), layers.back());
      }
      net->to(torch::kDouble);
      set_values(*net, 1);
      if (!nets_.empty()) copy(*nets_[0], *net);
      nets_.push_back(net);
      layers_.push_back(layers);
    }
    nets_.resize(static_cast<size_t>(ranks));
    layers_.resize(static_cast<size_t>(ranks));
  }

  OfRanks forward(const OfRanks& inputs, int step) {
    auto x = inputs;
    for (size_t i = 0; i < labels_.size(); ++i) {
      std::vector<std::shared_ptr<Layer>> copies;
      for (size_t rank = 0; rank < nets_.size(); ++rank) {
        copies.push_back(layers_[rank][i]);
        copies.back()->used = uses_sometimes(program_, step, static_cast<int>(rank));
      }
      const auto& kind = layer_kinds().at(labels_[i]);
      if (kind.together) {
        x = kind.together(copies, x);
      } else {
        for (size_t rank = 0; rank < x.size(); ++rank) x[rank] = copies[rank]->forward(x[rank]);
      }
    }
    return x;
  }

  std::vector<at::Tensor> parameters(size_t rank) const { return unique(nets_[rank]->parameters()); }
  Net& net(size_t rank = 0) { return *nets_[rank]; }
  size_t size() const { return nets_.size(); }
  std::vector<std::shared_ptr<Layer>>& layers(size_t rank) { return layers_[rank]; }

  /// Copies parameters and, if asked, buffers of one copy to another.
  static void copy(Net& from, Net& to, bool buffers = true) {
    const torch::NoGradGuard no_grad;
    for (const auto& item : from.named_parameters()) to.named_parameters()[item.key()].copy_(item.value());
    if (!buffers) return;
    for (const auto& item : from.named_buffers()) to.named_buffers()[item.key()].copy_(item.value());
  }

 private:
  const Program& program_;
  std::vector<std::string> labels_;
  std::vector<std::shared_ptr<Net>> nets_;
  std::vector<std::vector<std::shared_ptr<Layer>>> layers_;
};

class Reference {
 public:
  explicit Reference(const Program& program) : program_(program), copies_(program) {}

  std::vector<Record> run() {
    copies_.set_ranks(ranks_of(program_, 0));
    make_optimizer_anew();
    for (int step = 0; step < program_.number("steps"); ++step) {
      if (step == reload_step(program_)) copies_.set_ranks(ranks_of(program_, step));
      records_.resize(std::max(records_.size(), copies_.size()));
      run_step(step);
    }
    for (size_t rank = 0; rank < copies_.size(); ++rank) note_values("end", rank);
    return records_;
  }

 private:
  void make_optimizer_anew() {
    optimizer_ = make_optimizer(
        program_.label("optimizer"), param_groups(program_, copies_.parameters(0), 0));
  }

  bool active(int step, size_t rank) const { return has_input(program_, step, static_cast<int>(rank)); }

  void run_step(int step) {
    optimizer_->zero_grad();
    extra_.mutable_grad().reset();
    if (is_frozen(program_, step)) {
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        for (auto& p : copies_.layers(rank)[0]->parameters()) p.set_requires_grad(false);
      }
    }
    samples_.assign(copies_.size(), 0);
    std::map<int, OfRanks> losses;  // by batch
    const auto passes = passes_of(program_, step);
    const auto forward_of = [&](int batch) { losses[batch] = forward(step, batch); };
    if (forwards_come_first(program_)) {
      for (const auto& pass : passes) std::for_each(pass.batches.begin(), pass.batches.end(), forward_of);
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
      if (active(step, rank) && !overflows(step)) note_gradients(step, rank);
    }
    clip();
    if (!overflows(step)) optimizer_->step();
    for (size_t rank = 1; rank < copies_.size(); ++rank) Copies::copy(copies_.net(), copies_.net(rank), false);
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      if (active(step, rank)) note_values(std::to_string(step), rank);
    }
  }

  bool overflows(int step) const { return program_.is("scaler", "overflow") && step == 0; }

  /// Losses of all ranks, with graphs.
  OfRanks forward(int step, int batch) {
    OfRanks inputs, targets;
    const auto rows = rows_of(program_, step, batch);
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      const auto seed = data_seed(step, batch, static_cast<int>(rank));
      inputs.push_back(values(seed, {rows[rank], 4}));
      targets.push_back(values(seed + 5, {rows[rank], 4}));
    }
    OfRanks penalties(copies_.size());
    const auto penalize = [&] {
      for (size_t rank = 0; rank < penalties.size(); ++rank) penalties[rank] = penalty_of(copies_.parameters(rank));
    };
    if (program_.is("penalty", "before")) penalize();
    auto outputs = copies_.forward(inputs, step);
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
    for (size_t rank = 0; rank < losses.size(); ++rank) {
      if (active(step, rank)) {
        note(records_[rank], std::to_string(step) + " loss of batch " + std::to_string(batch), losses[rank]);
      }
    }
    return losses;
  }

  std::vector<double> weights(int step) {
    std::vector<double> result;
    const double ranks = static_cast<double>(copies_.size());
    double active_ranks = 0, all = 0;
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      active_ranks += active(step, rank) ? 1 : 0;
      all += static_cast<double>(samples_[rank]);
    }
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      double weight = 1 / (program_.is("join", "by_active") ? active_ranks : ranks);
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
      const auto weighted = waiting[rank] * weight[rank];
      total = total.defined() ? total + weighted : weighted;
      waiting[rank] = at::Tensor();
    }
    std::vector<at::Tensor> leaves;
    std::vector<size_t> of;  // the parameter of each leaf, by its number
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      const auto parameters = copies_.parameters(rank);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].requires_grad()) leaves.push_back(parameters[i]), of.push_back(i);
      }
    }
    leaves.push_back(extra_);
    const auto gradients = torch::autograd::grad({total}, leaves, {}, /*retain_graph=*/true, false, true);
    const auto parameters = copies_.parameters(0);
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (i == of.size()) {
        extra_.mutable_grad() = extra_.grad().defined() ? extra_.grad() + gradients[i] : gradients[i].clone();
        break;
      }
      auto& gradient = parameters[of[i]].mutable_grad();
      const auto dense = gradients[i].to_dense();
      gradient = gradient.defined() ? gradient + dense : dense.clone();
    }
    if (program_.is("buffers_of", "rank_0|rank_0_later")) {
      size_t source = 0;
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        if (program_.is("join", "default|by_active|optimizers") && active(step, rank)) source = rank;
      }
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        if (rank == source) continue;
        const torch::NoGradGuard no_grad;
        for (const auto& item : copies_.net(source).named_buffers()) {
          copies_.net(rank).named_buffers()[item.key()].set_data(item.value().clone());
        }
      }
    }
  }

  void clip() {
    const auto parameters = copies_.parameters(0);
    const auto& label = program_.label("clip");
    if (label == "2" || label == "torch") torch::nn::utils::clip_grad_norm_(parameters, 0.5);
    if (label == "1") torch::nn::utils::clip_grad_norm_(parameters, 0.5, 1);
    if (label == "inf") torch::nn::utils::clip_grad_norm_(parameters, 0.5, INFINITY);
    if (label == "value") torch::nn::utils::clip_grad_value_(parameters, 0.1);
  }

  void note_gradients(int step, size_t rank) {
    if (extra_.grad().defined()) note(records_[rank], std::to_string(step) + " gradient of extra", extra_.grad());
    for (const auto& item : copies_.net().named_parameters()) {
      note(records_[rank], std::to_string(step) + " gradient of " + item.key(), item.value().grad());
    }
  }
  void note_values(const std::string& when, size_t rank) {
    for (const auto& item : copies_.net().named_parameters()) {
      note(records_[rank], when + " parameter " + item.key(), item.value());
    }
    for (const auto& item : copies_.net(rank).named_buffers()) {
      note(records_[rank], when + " buffer " + item.key(), item.value());
    }
  }

  const Program& program_;
  Copies copies_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  at::Tensor extra_ = values(3, {2}).requires_grad_();
  std::map<size_t, int64_t> counted_;  // samples since the last averaged pass
  std::vector<int64_t> samples_;       // of the averaged pass
  std::vector<Record> records_;
};

}  // namespace

std::vector<Record> reference(const Program& program) { return Reference(program).run(); }

}  // namespace ddp::differential
