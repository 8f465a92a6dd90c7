// Schedules that compute the next rate from the present one, so that several may run at once.
// Operations are in Python's order: another order rounds differently.
#include <algorithm>
#include <cmath>

#include <c10/util/MathConstants.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>
#include <ddp/lr_scheduler.h>

namespace ddp {
namespace {

template <typename Rule>
std::vector<double> map_rates(std::vector<double> lrs, const Rule& rule) {
  for (size_t group = 0; group < lrs.size(); ++group) lrs[group] = rule(lrs[group], group);
  return lrs;
}

void check_lambdas(
    const char* schedule, const std::vector<LambdaLR::Lambda>& lr_lambdas, size_t groups) {
  DDP_CHECK_VALUE(
      lr_lambdas.size() == groups, schedule, ": expected one function, or one for each of the ",
      groups, " parameter groups, got ", lr_lambdas.size(), ".");
  for (const auto& lr_lambda : lr_lambdas) {
    DDP_CHECK_VALUE(lr_lambda, schedule, ": expected a function for lr_lambda, got an empty one.");
  }
}

}  // namespace

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, Lambda lr_lambda)
    : LambdaLR(optimizer, std::vector<Lambda>(optimizer.param_groups().size(), lr_lambda)) {}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Lambda> lr_lambdas)
    : LRScheduler(optimizer, "LambdaLR"), lr_lambdas_(std::move(lr_lambdas)) {
  check_lambdas(name(), lr_lambdas_, base_lrs().size());
  step();
}

std::vector<double> LambdaLR::next_lrs(int64_t epoch) {
  return map_rates(
      base_lrs(), [&](double base, size_t group) { return base * lr_lambdas_[group](epoch); });
}

MultiStepLR::MultiStepLR(torch::optim::Optimizer& optimizer, MultiStepLROptions options)
    : LRScheduler(optimizer, "MultiStepLR"), options_(std::move(options)) {
  step();
}

std::vector<double> MultiStepLR::next_lrs(int64_t epoch) {
  const auto& milestones = options_.milestones();
  const auto times = std::count(milestones.begin(), milestones.end(), epoch);
  const double factor = std::pow(options_.gamma(), static_cast<double>(times));
  return map_rates(get_last_lr(), [&](double lr, size_t) { return times == 0 ? lr : lr * factor; });
}

std::vector<double> MultiStepLR::first_lrs_in_sequence() {
  const auto& milestones = options_.milestones();
  const auto times = count_if(milestones, [](int64_t milestone) { return milestone <= 0; });
  const double factor = std::pow(options_.gamma(), static_cast<double>(times));
  return map_rates(base_lrs(), [&](double base, size_t) { return base * factor; });
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options)
    : LRScheduler(optimizer, "LinearLR"), options_(options) {
  DDP_CHECK_VALUE(
      options_.start_factor() > 0 && options_.start_factor() <= 1,
      "LinearLR: expected 0 < start_factor <= 1, got ", options_.start_factor(), ".");
  DDP_CHECK_VALUE(
      options_.end_factor() >= 0 && options_.end_factor() <= 1,
      "LinearLR: expected 0 <= end_factor <= 1, got ", options_.end_factor(), ".");
  DDP_CHECK_VALUE(
      options_.total_iters() >= 1, "LinearLR: expected total_iters >= 1, got ",
      options_.total_iters(), ".");
  step();
}

std::vector<double> LinearLR::next_lrs(int64_t epoch) {
  if (epoch == 0) {
    return map_rates(
        get_last_lr(), [&](double lr, size_t) { return lr * options_.start_factor(); });
  }
  if (epoch > options_.total_iters()) return get_last_lr();
  const double change = options_.end_factor() - options_.start_factor();
  const double before = static_cast<double>(options_.total_iters()) * options_.start_factor() +
                        static_cast<double>(epoch - 1) * change;
  return map_rates(get_last_lr(), [&](double lr, size_t) { return lr * (1.0 + change / before); });
}

std::vector<double> LinearLR::first_lrs_in_sequence() {
  return map_rates(base_lrs(), [&](double base, size_t) { return base * options_.start_factor(); });
}

ConstantLR::ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options)
    : LRScheduler(optimizer, "ConstantLR"), options_(options) {
  DDP_CHECK_VALUE(
      options_.factor() > 0 && options_.factor() <= 1, "ConstantLR: expected 0 < factor <= 1, got ",
      options_.factor(), ".");
  DDP_CHECK_VALUE(
      options_.total_iters() >= 1, "ConstantLR: expected total_iters >= 1, got ",
      options_.total_iters(), ".");
  step();
}

std::vector<double> ConstantLR::next_lrs(int64_t epoch) {
  if (epoch != 0 && epoch != options_.total_iters()) return get_last_lr();
  const double factor = epoch == 0 ? options_.factor() : 1.0 / options_.factor();
  return map_rates(get_last_lr(), [&](double lr, size_t) { return lr * factor; });
}

std::vector<double> ConstantLR::first_lrs_in_sequence() {
  return map_rates(base_lrs(), [&](double base, size_t) { return base * options_.factor(); });
}

ExponentialLR::ExponentialLR(torch::optim::Optimizer& optimizer, double gamma)
    : LRScheduler(optimizer, "ExponentialLR"), gamma_(gamma) {
  step();
}

std::vector<double> ExponentialLR::next_lrs(int64_t epoch) {
  if (epoch == 0) return get_last_lr();
  return map_rates(get_last_lr(), [&](double lr, size_t) { return lr * gamma_; });
}

PolynomialLR::PolynomialLR(torch::optim::Optimizer& optimizer, const PolynomialLROptions& options)
    : LRScheduler(optimizer, "PolynomialLR"), options_(options) {
  DDP_CHECK_VALUE(
      options_.total_iters() >= 1, "PolynomialLR: expected total_iters >= 1, got ",
      options_.total_iters(), ".");
  step();
}

std::vector<double> PolynomialLR::next_lrs(int64_t epoch) {
  if (epoch == 0 || epoch > options_.total_iters()) return get_last_lr();
  const auto total = static_cast<double>(options_.total_iters());
  const double factor = std::pow(
      (1.0 - static_cast<double>(epoch) / total) / (1.0 - static_cast<double>(epoch - 1) / total),
      options_.power());
  return map_rates(get_last_lr(), [&](double lr, size_t) { return lr * factor; });
}

MultiplicativeLR::MultiplicativeLR(torch::optim::Optimizer& optimizer, Lambda lr_lambda)
    : MultiplicativeLR(optimizer, std::vector<Lambda>(optimizer.param_groups().size(), lr_lambda)) {
}

MultiplicativeLR::MultiplicativeLR(
    torch::optim::Optimizer& optimizer, std::vector<Lambda> lr_lambdas)
    : LRScheduler(optimizer, "MultiplicativeLR"), lr_lambdas_(std::move(lr_lambdas)) {
  check_lambdas(name(), lr_lambdas_, base_lrs().size());
  step();
}

std::vector<double> MultiplicativeLR::next_lrs(int64_t epoch) {
  return epoch == 0 ? get_last_lr() : multiplied(epoch);
}

std::vector<double> MultiplicativeLR::multiplied(int64_t epoch) const {
  check_groups();
  return map_rates(
      get_last_lr(), [&](double lr, size_t group) { return lr * lr_lambdas_[group](epoch); });
}

CosineAnnealingLR::CosineAnnealingLR(
    torch::optim::Optimizer& optimizer, const CosineAnnealingLROptions& options)
    : LRScheduler(optimizer, "CosineAnnealingLR"), options_(options) {
  DDP_CHECK_VALUE(
      options_.T_max() >= 1, "CosineAnnealingLR: expected T_max >= 1, got ", options_.T_max(),
      ". Set the number of steps from the initial rate to the least one.");
  step();
}

std::vector<double> CosineAnnealingLR::next_lrs(int64_t epoch) {
  if (epoch == 0) return get_last_lr();
  const auto T_max = static_cast<double>(options_.T_max());
  const double eta_min = options_.eta_min();
  // The present rate is the least one, from which no factor leads up again.
  if ((epoch - 1 - options_.T_max()) % (2 * options_.T_max()) == 0) {
    check_groups();
    return map_rates(get_last_lr(), [&](double lr, size_t group) {
      return lr + (base_lrs()[group] - eta_min) * (1 - std::cos(c10::pi<double> / T_max)) / 2;
    });
  }
  const auto height = [&](int64_t at) {
    return 1 + std::cos(c10::pi<double> * static_cast<double>(at) / T_max);
  };
  const double ratio = height(epoch) / height(epoch - 1);
  return map_rates(
      get_last_lr(), [&](double lr, size_t) { return ratio * (lr - eta_min) + eta_min; });
}

std::vector<double> CosineAnnealingLR::first_lrs_in_sequence() {
  const double eta_min = options_.eta_min();
  return map_rates(base_lrs(), [&](double base, size_t) {
    return eta_min + (base - eta_min) * (1 + std::cos(0.0)) / 2;
  });
}

}  // namespace ddp
