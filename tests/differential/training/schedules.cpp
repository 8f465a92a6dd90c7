// Schedules of the rate: the library's on the ranks, and their formulas for the reference.
#include <cmath>

#include <ddp/lr_cycles.h>
#include <ddp/lr_scheduler.h>

#include "differential/rounding.h"
#include "differential/run.h"
#include "differential/training/optimizers.h"

namespace ddp::differential {

namespace {

/// Schedules that compute the next rate from the present one, and a chain of them.
void make_chainable(RankRun& run, const std::string& label) {
  auto& trace = run.trace;
  auto& optimizer = *run.optimizer;
  auto& schedule = run.schedule;
  auto& parts = run.parts_of_schedule;
  if (label == "hold")
    DDP_DO(
        trace, schedule = std::make_shared<ConstantLR>(
                   optimizer, ConstantLROptions().factor(0.5).total_iters(2)));
  if (label == "exponential")
    DDP_DO(trace, schedule = std::make_shared<ExponentialLR>(optimizer, 0.5));
  if (label == "polynomial")
    DDP_DO(
        trace, schedule = std::make_shared<PolynomialLR>(
                   optimizer, PolynomialLROptions().total_iters(4).power(2)));
  if (label == "multiplicative")
    DDP_DO(trace, schedule = std::make_shared<MultiplicativeLR>(optimizer, [](int64_t epoch) {
                    return 1.0 / static_cast<double>(1 + epoch);
                  }));
  if (label == "swa")
    DDP_DO(
        trace, schedule = std::make_shared<SWALR>(
                   optimizer, SWALROptions(0.05).anneal_epochs(3).anneal_strategy("linear")));
  if (label == "chain") {
    DDP_DO(
        trace, parts.push_back(std::make_shared<ConstantLR>(
                   optimizer, ConstantLROptions().factor(0.5).total_iters(1))));
    DDP_DO(trace, parts.push_back(std::make_shared<ExponentialLR>(optimizer, 0.5)));
    DDP_DO(
        trace, schedule = std::make_shared<ChainedScheduler>(
                   std::vector<LRScheduler*>{parts[0].get(), parts[1].get()}));
  }
}

/// The rate after the steps of a schedule of make_chainable().
std::optional<double> chainable_rate(const std::string& label, int step, double initial) {
  if (label == "hold") return initial * (step < 2 ? 0.5 : 1);
  if (label == "exponential") return initial * std::pow(0.5, step);
  if (label == "polynomial") return initial * std::pow(1 - std::min(step, 4) / 4.0, 2);
  if (label == "multiplicative") return initial / std::tgamma(step + 2);
  if (label == "swa") return initial + (0.05 - initial) * std::min(step, 3) / 3.0;
  if (label == "chain") return initial * (step == 0 ? 0.5 : std::pow(0.5, step));
  return std::nullopt;
}

template <typename... Options>
void set_momentum(torch::optim::OptimizerOptions& options, double momentum) {
  const auto set = [&](auto* own) {
    if (own != nullptr) own->momentum(momentum);
  };
  (set(dynamic_cast<Options*>(&options)), ...);
}
template <typename... Options>
void set_beta1(torch::optim::OptimizerOptions& options, double beta1) {
  const auto set = [&](auto* own) {
    if (own != nullptr) own->betas({beta1, std::get<1>(own->betas())});
  };
  (set(dynamic_cast<Options*>(&options)), ...);
}

}  // namespace

void make_schedule(RankRun& run) {
  const auto& label = run.program.label("schedule_of_rate");
  auto& trace = run.trace;
  auto& optimizer = *run.optimizer;
  auto& schedule = run.schedule;
  auto& parts = run.parts_of_schedule;
  trace.say(
      "std::shared_ptr<ddp::LRScheduler> schedule; std::vector<std::shared_ptr<ddp::LRScheduler>> "
      "parts;");
  if (label == "lambda")
    DDP_DO(trace, schedule = std::make_shared<LambdaLR>(optimizer, [](int64_t epoch) {
                    return 1.0 / static_cast<double>(1 + epoch);
                  }));
  if (label == "multi_step")
    DDP_DO(
        trace, schedule = std::make_shared<MultiStepLR>(
                   optimizer, MultiStepLROptions({1, 2, 2}).gamma(0.5)));
  if (label == "linear")
    DDP_DO(
        trace,
        schedule = std::make_shared<LinearLR>(
            optimizer, LinearLROptions().start_factor(0.25).end_factor(0.75).total_iters(2)));
  if (label == "cosine")
    DDP_DO(
        trace, schedule = std::make_shared<CosineAnnealingLR>(
                   optimizer, CosineAnnealingLROptions(2).eta_min(0.001)));
  if (label == "one_cycle")
    DDP_DO(
        trace, schedule = std::make_shared<OneCycleLR>(
                   optimizer, OneCycleLROptions(0.2, 5).pct_start(0.4)));
  if (label == "one_cycle_rates") {
    DDP_DO(
        trace, schedule = std::make_shared<OneCycleLR>(
                   optimizer, OneCycleLROptions()
                                  .max_lr(0.2)
                                  .epochs(2)
                                  .steps_per_epoch(3)
                                  .pct_start(0.5)
                                  .anneal_strategy("linear")
                                  .three_phase(true)
                                  .div_factor(10)
                                  .final_div_factor(100)
                                  .cycle_momentum(false)));
  }
  make_chainable(run, label);
  if (label == "restarts")
    DDP_DO(
        trace, schedule = std::make_shared<CosineAnnealingWarmRestarts>(
                   optimizer, CosineAnnealingWarmRestartsOptions(2).T_mult(2).eta_min(0.001)));
  if (label == "cyclic")
    DDP_DO(
        trace, schedule = std::make_shared<CyclicLR>(
                   optimizer, CyclicLROptions(0.05, 0.2).step_size_up(1).step_size_down(2).mode(
                                  "triangular2")));
  if (label == "sequence") {
    DDP_DO(
        trace, parts.push_back(std::make_shared<LinearLR>(
                   optimizer, LinearLROptions().start_factor(0.5).total_iters(2))));
    DDP_DO(trace, parts.push_back(std::make_shared<CosineAnnealingLR>(optimizer, 4)));
    DDP_DO(
        trace, schedule = std::make_shared<SequentialLR>(
                   optimizer, std::vector<LRScheduler*>{parts[0].get(), parts[1].get()},
                   std::vector<int64_t>{1}));
  }
}

Rate rate_of(const Program& program, int step, double initial) {
  const auto& label = program.label("schedule_of_rate");
  const auto half_cosine = [](double from, double to, double share) {
    return to + (from - to) / 2 * (1 + std::cos(M_PI * share));
  };
  if (const auto rate = chainable_rate(label, step, initial)) return {*rate, {}};
  if (label == "restarts") {
    int begin = 0, period = 2;
    while (step - begin >= period) begin += period, period *= 2;
    return {half_cosine(initial, 0.001, static_cast<double>(step - begin) / period), {}};
  }
  if (label == "cyclic") {  // up in one step, down in two, half as high each time
    const double height = (step % 3 == 0 ? 0 : step % 3 == 1 ? 1 : 0.5) * std::pow(0.5, step / 3);
    return {0.05 + 0.15 * height, 0.9 - 0.1 * height};
  }
  if (label == "lambda") return {initial / (1 + step), {}};
  if (label == "multi_step")
    return {initial * std::pow(0.5, step == 0 ? 0 : step == 1 ? 1 : 3), {}};
  if (label == "linear") return {initial * (0.25 + 0.5 * std::min(step, 2) / 2), {}};
  if (label == "cosine") return {half_cosine(initial, 0.001, step / 2.0), {}};
  if (label == "one_cycle") {  // from 0.2 / 25 up in step 1, and down to that / 1e4 in step 4
    if (step <= 1) return {half_cosine(0.2 / 25, 0.2, step), half_cosine(0.95, 0.85, step)};
    return {
        half_cosine(0.2, 0.2 / 25 / 1e4, (step - 1) / 3.0),
        half_cosine(0.85, 0.95, (step - 1) / 3.0)};
  }
  // Six steps, of which the first phase ends after 2, as does the second after 4.
  if (label == "one_cycle_rates")
    return {0.02 + 0.18 * (step <= 2 ? step / 2.0 : (4 - step) / 2.0), {}};
  if (label == "sequence")
    return {step == 0 ? initial / 2 : half_cosine(initial, 0, (step - 1) / 4.0), {}};
  return {initial, {}};
}

void set_rates(const Program& program, int step, torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const auto rate = rate_of(program, step, initial_rate(program));
  for (auto& group : optimizer.param_groups()) {
    group.options().set_lr(rate.rate);
    if (!rate.momentum) continue;
    const auto momentum = *rate.momentum;
    set_momentum<SGDOptions, RMSpropOptions, ddp::optim::MuonOptions>(group.options(), momentum);
    set_beta1<
        AdamOptions, AdamWOptions, ddp::optim::NAdamOptions, ddp::optim::RAdamOptions,
        ddp::optim::AdamaxOptions, ddp::optim::LionOptions, ddp::optim::LAMBOptions>(
        group.options(), momentum);
  }
}

}  // namespace ddp::differential
