// Ranks that train by themselves, and what the reference makes of their parameters.
#include <cmath>

#include "differential/rounding.h"

namespace ddp::differential {

bool is_wrapped(const Program& program) {
  return program.has("locally") || program.is("hook", "noop") || program.is("regions", "one|pairs");
}

std::vector<int> regions_of(const Program& program, int step) {
  std::vector<int> result;
  const bool pairs = program.is("regions", "pairs");
  const bool alone = program.is("hook", "noop") ||
                     (program.is("training", "averager") && !program.has("hook")) ||
                     (program.is("training", "diloco") && program.is("regions", "each"));
  for (int rank = 0; rank < axes_of(program, step).dp; ++rank)
    result.push_back(alone ? rank : pairs ? rank / 2 : 0);
  return result;
}

size_t source_of_buffers(const Program& program, size_t rank) {
  if (!program.is("training", "averager|diloco")) return 0;
  if (!is_wrapped(program) || program.has("locally")) return rank;
  return program.is("regions", "pairs") ? rank / 2 * 2 : 0;
}

bool drifts(const Program& program) {
  return program.is("training", "averager") ||
         (program.is("training", "diloco") && program.is("regions", "each|pairs"));
}

namespace {

/// Whether an averager averages over all ranks after a step.
bool averages_all(const Program& program, int step) {
  const bool waits = program.is("averager", "warm_up|optimizer");
  return (step - (waits ? 1 : 0)) % 2 == 0;
}

struct Outer {
  int64_t every = 1, fragments = 1, overlap = 0;
  double rate = 0.7, momentum = 0.9, mix = 0;
  bool nesterov = true;
};
Outer outer_of(const Program& program) {
  Outer outer;
  if (program.has("outer")) outer.every = 2;
  if (program.is("outer", "plain")) outer.rate = 0.5, outer.momentum = 0.5, outer.nesterov = false;
  if (program.is("outer", "fragments")) outer.fragments = 2;
  if (program.is("outer", "overlap")) outer.overlap = 1, outer.mix = 0.25;
  return outer;
}

at::Tensor flat_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> flat;
  for (const auto& p : parameters) flat.push_back(p.detach().flatten());
  return torch::cat(flat);
}

void write(const std::vector<at::Tensor>& parameters, const at::Tensor& flat) {
  const torch::NoGradGuard no_grad;
  int64_t at = 0;
  for (const auto& p : parameters) {
    p.copy_(flat.narrow(0, at, p.numel()).reshape(p.sizes()));
    at += p.numel();
  }
}

}  // namespace

bool are_equal_after(const Program& program, int step) {
  if (!drifts(program)) return true;
  if (program.is("training", "averager")) return averages_all(program, step);
  return program.is("outer", "each_step") || (program.is("outer", "plain") && step == 1);
}

void Averages::begin(const OfAll& ranks) {
  if (!program_.is("training", "diloco")) return;
  outer_ = flat_of(ranks[0]).to(torch::kDouble);
  momentum_ = torch::zeros_like(outer_);
}

void Averages::average(const OfAll& ranks, size_t first, size_t size) {
  at::Tensor sum;
  for (size_t rank = first; rank < first + size; ++rank) {
    const auto own = flat_of(ranks[rank]);
    sum = sum.defined() ? sum + own : own;
  }
  for (size_t rank = first; rank < first + size; ++rank)
    write(ranks[rank], sum / static_cast<double>(size));
}

void Averages::after_step(int step, const OfAll& ranks) {
  if (program_.is("training", "averager")) {
    if (averages_all(program_, step)) average(ranks, 0, ranks.size());
    return;
  }
  if (due_ == step) arrive(ranks);
  const auto outer = outer_of(program_);
  for (int64_t f = 0; f < outer.fragments; ++f) {
    if ((step + 1 - outer.every * (f + 1) / outer.fragments) % outer.every != 0) continue;
    from_ = outer_.numel() * f / outer.fragments;
    const auto size = outer_.numel() * (f + 1) / outer.fragments - from_;
    mean_ = torch::zeros({size}, torch::kDouble);
    const double of_wire = precision_of(program_).of_wire;
    double largest = 0;
    for (const auto& parameters : ranks) {
      const auto own = outer_.narrow(0, from_, size) - flat_of(parameters).narrow(0, from_, size);
      largest = std::max(largest, own.abs().max().item<double>());
      mean_ += own / static_cast<double>(ranks.size());
    }
    // Not of each rank's: of a single element they cancelled in all noises.
    noise_.add(mean_, 0, 4 * of_wire * largest);
    due_ = step + outer.overlap;
    if (outer.overlap == 0) arrive(ranks);
  }
}

void Averages::arrive(const OfAll& ranks) {
  const auto options = outer_of(program_);
  auto outer = outer_.narrow(0, from_, mean_.numel()),
       momentum = momentum_.narrow(0, from_, mean_.numel());
  momentum.mul_(options.momentum).add_(mean_);
  outer.sub_(options.nesterov ? mean_ + momentum * options.momentum : momentum, options.rate);
  if (precision_of(program_).module == torch::kFloat) noise_.add(outer, 2 * kOfFloat);
  for (const auto& parameters : ranks) {
    auto flat = flat_of(parameters);
    auto own = flat.narrow(0, from_, mean_.numel());
    own.copy_(own * options.mix + outer * (1 - options.mix));
    write(parameters, flat);
  }
  due_ = -1;
}

void Averages::finish(const OfAll& ranks) {
  if (due_ >= 0) arrive(ranks);
}

}  // namespace ddp::differential
