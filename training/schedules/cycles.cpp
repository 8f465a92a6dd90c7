// Schedules that begin again and again. Operations are in Python's order: another order rounds
// differently.
#include <cmath>

#include <c10/util/MathConstants.h>
#include <ddp/internal/check.h>
#include <ddp/lr_cycles.h>
#include <torch/serialize.h>

#include "schedules/momentum.h"
#include "schedules/per_group.h"

namespace ddp {

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(
    torch::optim::Optimizer& optimizer, const CosineAnnealingWarmRestartsOptions& options)
    : LRScheduler(optimizer, "CosineAnnealingWarmRestarts"), options_(options) {
  DDP_CHECK_VALUE(
      options_.T_0() >= 1, "CosineAnnealingWarmRestarts: expected T_0 >= 1, got ", options_.T_0(),
      ". Set the number of steps until the first restart.");
  DDP_CHECK_VALUE(
      options_.T_mult() >= 1, "CosineAnnealingWarmRestarts: expected T_mult >= 1, got ",
      options_.T_mult(), ".");
  step();
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  DDP_CHECK_VALUE(
      std::isfinite(epoch) && epoch >= 0,
      "CosineAnnealingWarmRestarts: expected an epoch >= 0, got ", epoch, ".");
  asked_ = epoch;
  set_next_epoch(static_cast<int64_t>(std::floor(epoch)));
  step();
}

void CosineAnnealingWarmRestarts::go_to(double epoch) {
  const auto T_0 = static_cast<double>(options_.T_0());
  const auto T_mult = static_cast<double>(options_.T_mult());
  if (epoch < T_0) {
    T_i_ = T_0;
    T_cur_ = epoch;
  } else if (options_.T_mult() == 1) {
    T_cur_ = std::fmod(epoch, T_0);
  } else {
    const double restarts = std::log(epoch / T_0 * (T_mult - 1) + 1) / std::log(T_mult);
    double power = 1;
    for (auto n = static_cast<int64_t>(restarts); n > 0; --n) power *= T_mult;
    T_cur_ = epoch - T_0 * (power - 1) / (T_mult - 1);
    T_i_ = T_0 * power;
  }
}

std::vector<double> CosineAnnealingWarmRestarts::next_lrs(int64_t epoch) {
  if (const auto asked = std::exchange(asked_, std::nullopt)) {
    go_to(*asked);
  } else if (epoch == 0) {
    go_to(0);
  } else if (++T_cur_ >= T_i_) {
    T_cur_ = std::fmod(T_cur_, T_i_);
    T_i_ *= static_cast<double>(options_.T_mult());
  }
  const double eta_min = options_.eta_min();
  auto lrs = base_lrs();
  for (auto& lr : lrs) {
    lr = eta_min + (lr - eta_min) * (1 + std::cos(c10::pi<double> * T_cur_ / T_i_)) / 2;
  }
  return lrs;
}

void CosineAnnealingWarmRestarts::save(torch::serialize::OutputArchive& archive) const {
  LRScheduler::save(archive);
  archive.write("T_cur", c10::IValue(T_cur_));
  archive.write("T_i", c10::IValue(T_i_));
}

void CosineAnnealingWarmRestarts::load(torch::serialize::InputArchive& archive) {
  c10::IValue T_cur;
  c10::IValue T_i;
  archive.read("T_cur", T_cur);
  archive.read("T_i", T_i);
  LRScheduler::load(archive);
  T_cur_ = T_cur.toDouble();
  T_i_ = T_i.toDouble();
}

CyclicLR::CyclicLR(torch::optim::Optimizer& optimizer, CyclicLROptions options)
    : LRScheduler(optimizer, "CyclicLR"), options_(std::move(options)) {
  check_options();
  auto lowest = base_lrs();
  for (size_t group = 0; group < lowest.size(); ++group) {
    lowest[group] = value_of_group(options_.base_lr(), group);
  }
  set_base_lrs(std::move(lowest));
  step();
}

void CyclicLR::check_options() const {
  const auto groups = base_lrs().size();
  check_count(name(), "base_lr", options_.base_lr(), groups);
  check_count(name(), "max_lr", options_.max_lr(), groups);
  check_count(name(), "base_momentum", options_.base_momentum(), groups);
  check_count(name(), "max_momentum", options_.max_momentum(), groups);
  DDP_CHECK_VALUE(
      options_.step_size_up() >= 1 && options_.step_size_down().value_or(1) >= 0,
      "CyclicLR: expected step_size_up >= 1 and step_size_down >= 0, got ", options_.step_size_up(),
      " and ", options_.step_size_down().value_or(options_.step_size_up()), ".");
  const auto& mode = options_.mode();
  DDP_CHECK_VALUE(
      options_.scale_fn() || mode == "triangular" || mode == "triangular2" || mode == "exp_range",
      "CyclicLR: expected \"triangular\", \"triangular2\" or \"exp_range\" for mode, or a "
      "scale_fn, "
      "got \"",
      mode, "\".");
  DDP_CHECK_VALUE(
      options_.scale_mode() == "cycle" || options_.scale_mode() == "iterations",
      "CyclicLR: expected \"cycle\" or \"iterations\" for scale_mode, got \"",
      options_.scale_mode(), "\".");
}

double CyclicLR::height(double cycle, int64_t epoch) const {
  const auto iterations = static_cast<double>(epoch);
  if (options_.scale_fn()) {
    return options_.scale_fn()(options_.scale_mode() == "cycle" ? cycle : iterations);
  }
  if (options_.mode() == "triangular2") return 1 / std::pow(2.0, cycle - 1);
  if (options_.mode() == "exp_range") return std::pow(options_.gamma(), iterations);
  return 1;
}

std::vector<double> CyclicLR::next_lrs(int64_t epoch) {
  check_groups();
  const auto up = static_cast<double>(options_.step_size_up());
  const auto total =
      up + static_cast<double>(options_.step_size_down().value_or(options_.step_size_up()));
  const double ratio = up / total;
  const double cycles = static_cast<double>(epoch) / total;
  const double cycle = std::floor(1 + cycles);
  const double x = 1.0 + cycles - cycle;
  const double share = x <= ratio ? x / ratio : (x - 1) / (ratio - 1);
  const double scale = height(cycle, epoch);
  auto lrs = base_lrs();
  for (size_t group = 0; group < lrs.size(); ++group) {
    const double rise = (value_of_group(options_.max_lr(), group) - lrs[group]) * share;
    lrs[group] += rise * scale;
    if (!options_.cycle_momentum()) continue;
    const double highest = value_of_group(options_.max_momentum(), group);
    const double fall = (highest - value_of_group(options_.base_momentum(), group)) * share;
    cycle_momentum_to(highest - fall * scale, optimizer(), group, name());
  }
  return lrs;
}

}  // namespace ddp
