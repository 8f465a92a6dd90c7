// Operations are in Python's order: another order rounds differently.
#include <algorithm>
#include <cmath>

#include <c10/util/MathConstants.h>
#include <ddp/internal/check.h>
#include <ddp/lr_scheduler.h>

#include "schedules/per_group.h"

namespace ddp {

SWALR::SWALR(torch::optim::Optimizer& optimizer, SWALROptions options)
    : LRScheduler(optimizer, "SWALR"), options_(std::move(options)) {
  check_count(name(), "swa_lr", options_.swa_lr(), base_lrs().size());
  DDP_CHECK_VALUE(
      options_.anneal_strategy() == "cos" || options_.anneal_strategy() == "linear",
      "SWALR: expected \"cos\" or \"linear\" for anneal_strategy, got \"",
      options_.anneal_strategy(), "\".");
  DDP_CHECK_VALUE(
      options_.anneal_epochs() >= 0, "SWALR: expected anneal_epochs >= 0, got ",
      options_.anneal_epochs(), ".");
  step();
}

double SWALR::anneal(double share) const {
  if (options_.anneal_strategy() == "linear") return share;
  return (1 - std::cos(c10::pi<double> * share)) / 2;
}

std::vector<double> SWALR::next_lrs(int64_t epoch) {
  const auto epochs = static_cast<double>(std::max<int64_t>(1, options_.anneal_epochs()));
  const auto at =
      static_cast<double>(options_.anneal_epochs() == 0 ? std::max<int64_t>(1, epoch) : epoch);
  const auto weight_at = [&](double step) { return anneal(std::clamp(step / epochs, 0.0, 1.0)); };
  const double before = weight_at(at - 1);
  const double now = weight_at(at);
  if (options_.swa_lr().values().size() > 1) check_groups();
  auto lrs = get_last_lr();
  for (size_t group = 0; group < lrs.size(); ++group) {
    const double swa_lr = value_of_group(options_.swa_lr(), group);
    // The rate that it began at, of the present one: another schedule may have moved both.
    const double first = before == 1 ? swa_lr : (lrs[group] - before * swa_lr) / (1 - before);
    lrs[group] = swa_lr * now + first * (1 - now);
  }
  return lrs;
}

}  // namespace ddp
