#include <cmath>

#include <c10/util/MathConstants.h>
#include <ddp/internal/check.h>
#include <ddp/lr_scheduler.h>

#include "schedules/momentum.h"
#include "schedules/per_group.h"

namespace ddp {
namespace {

int64_t steps_of(const OneCycleLROptions& options) {
  if (options.total_steps()) return *options.total_steps();
  DDP_CHECK_VALUE(
      options.epochs() && options.steps_per_epoch(),
      "OneCycleLR: expected total_steps, or epochs and steps_per_epoch, got neither. Set one of "
      "them.");
  DDP_CHECK_VALUE(
      *options.epochs() >= 1 && *options.steps_per_epoch() >= 1,
      "OneCycleLR: expected epochs >= 1 and steps_per_epoch >= 1, got ", *options.epochs(), " and ",
      *options.steps_per_epoch(), ".");
  return *options.epochs() * *options.steps_per_epoch();
}

}  // namespace

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, OneCycleLROptions options)
    : LRScheduler(optimizer, "OneCycleLR"),
      options_(std::move(options)),
      total_steps_(steps_of(options_)) {
  check_options();
  phases_ = make_phases();
  auto initial = base_lrs();
  for (size_t group = 0; group < initial.size(); ++group) {
    initial[group] = value_of_group(options_.max_lr(), group) / options_.div_factor();
  }
  set_base_lrs(std::move(initial));
  step();
}

void OneCycleLR::check_options() const {
  const auto groups = base_lrs().size();
  check_count(name(), "max_lr", options_.max_lr(), groups);
  check_count(name(), "base_momentum", options_.base_momentum(), groups);
  check_count(name(), "max_momentum", options_.max_momentum(), groups);
  DDP_CHECK_VALUE(
      total_steps_ >= 1, "OneCycleLR: expected total_steps >= 1, got ", total_steps_, ".");
  DDP_CHECK_VALUE(
      options_.pct_start() >= 0 && options_.pct_start() <= 1,
      "OneCycleLR: expected 0 <= pct_start <= 1, got ", options_.pct_start(), ".");
  DDP_CHECK_VALUE(
      options_.anneal_strategy() == "cos" || options_.anneal_strategy() == "linear",
      "OneCycleLR: expected \"cos\" or \"linear\" for anneal_strategy, got \"",
      options_.anneal_strategy(), "\".");
  DDP_CHECK_VALUE(
      options_.div_factor() > 0 && options_.final_div_factor() > 0,
      "OneCycleLR: expected div_factor > 0 and final_div_factor > 0, got ", options_.div_factor(),
      " and ", options_.final_div_factor(), ".");
}

std::vector<OneCycleLR::Phase> OneCycleLR::make_phases() const {
  const auto steps = static_cast<double>(total_steps_);
  const double rise = options_.pct_start() * steps - 1;
  std::vector<Phase> phases{{rise, Level::Initial, Level::Max}};
  if (options_.three_phase()) {
    phases.push_back({2 * options_.pct_start() * steps - 2, Level::Max, Level::Initial});
    phases.push_back({steps - 1, Level::Initial, Level::Min});
  } else {
    phases.push_back({steps - 1, Level::Max, Level::Min});
  }
  return phases;
}

double OneCycleLR::lr_at(Level level, size_t group) const {
  switch (level) {
    case Level::Initial:
      return base_lrs()[group];
    case Level::Max:
      return value_of_group(options_.max_lr(), group);
    case Level::Min:
      break;
  }
  return base_lrs()[group] / options_.final_div_factor();
}

double OneCycleLR::momentum_at(Level level, size_t group) const {
  return value_of_group(
      level == Level::Max ? options_.base_momentum() : options_.max_momentum(), group);
}

double OneCycleLR::anneal(double start, double end, double share) const {
  if (options_.anneal_strategy() == "linear") return (end - start) * share + start;
  return end + (start - end) / 2.0 * (std::cos(c10::pi<double> * share) + 1);
}

std::vector<double> OneCycleLR::next_lrs(int64_t epoch) {
  check_groups();
  DDP_CHECK_VALUE(
      epoch <= total_steps_, "OneCycleLR: expected at most total_steps (", total_steps_,
      ") calls of step(), got call ", epoch, ". Set total_steps to the steps of the whole run.");
  const auto at = static_cast<double>(epoch);
  size_t current = 0;
  while (current + 1 < phases_.size() && at > phases_[current].end_step) ++current;
  const auto& phase = phases_[current];
  const double begin = current == 0 ? 0 : phases_[current - 1].end_step;
  DDP_CHECK_VALUE(
      phase.end_step != begin,
      "OneCycleLR: expected phases of some length, got one of none: ", "pct_start is ",
      options_.pct_start(), " of ", total_steps_, " steps. Set another pct_start.");
  const double share = (at - begin) / (phase.end_step - begin);
  auto lrs = base_lrs();
  for (size_t group = 0; group < lrs.size(); ++group) {
    lrs[group] = anneal(lr_at(phase.from, group), lr_at(phase.to, group), share);
    if (!options_.cycle_momentum()) continue;
    const double momentum =
        anneal(momentum_at(phase.from, group), momentum_at(phase.to, group), share);
    cycle_momentum_to(momentum, optimizer(), group, name());
  }
  return lrs;
}

}  // namespace ddp
