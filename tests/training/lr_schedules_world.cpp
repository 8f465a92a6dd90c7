// Prints rates and momentums of the schedules in lr_schedules.py, 17 digits each. In the middle
// each schedule is saved, and continues in new objects that load the file.
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ddp/lr_cycles.h>
#include <ddp/lr_scheduler.h>
#include <torch/torch.h>

#include "support/archives.h"

namespace ddp_lr_schedules_world {

namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
/// A schedule and the schedules that it needs; only the last one is stepped, unless the case says
/// otherwise.
using Schedules = std::vector<std::shared_ptr<ddp::LRScheduler>>;

std::vector<torch::optim::OptimizerParamGroup> groups() {
  return {
      torch::optim::OptimizerParamGroup({torch::zeros({1})}),
      torch::optim::OptimizerParamGroup({torch::zeros({1})})};
}

Optimizer sgd() {
  auto optimizer =
      std::make_unique<torch::optim::SGD>(groups(), torch::optim::SGDOptions(0.1).momentum(0.9));
  optimizer->param_groups()[1].options().set_lr(0.037);
  return optimizer;
}

Optimizer adam() {
  auto optimizer = std::make_unique<torch::optim::Adam>(groups(), torch::optim::AdamOptions(0.003));
  optimizer->param_groups()[1].options().set_lr(0.0007);
  return optimizer;
}

double momentum_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* of_sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return of_sgd->momentum();
  }
  return std::get<0>(dynamic_cast<const torch::optim::AdamOptions&>(options).betas());
}

struct Case {
  std::string name;
  Optimizer (*make_optimizer)();
  std::function<Schedules(torch::optim::Optimizer&)> make;
  /// Takes step number `step`, from 0.
  void (*take)(const Schedules& schedules, int step) = [](const Schedules& schedules, int) {
    schedules.back()->step();
  };
};

void take_all(const Schedules& schedules, int /*step*/) {
  for (const auto& schedule : schedules) schedule->step();
}

void take_in_turns(const Schedules& schedules, int step) { schedules[step >= 40]->step(); }

void take_fraction(const Schedules& schedules, int step) {
  auto& restarts = dynamic_cast<ddp::CosineAnnealingWarmRestarts&>(*schedules.back());
  if ((step + 1) % 10 == 0) {
    restarts.step();
  } else {
    restarts.step((step + 1) / 7.0);
  }
}

template <typename T, typename... Args>
std::function<Schedules(torch::optim::Optimizer&)> one(Args... args) {
  return [=](torch::optim::Optimizer& o) { return Schedules{std::make_shared<T>(o, args...)}; };
}

std::vector<Case> cases() {
  using namespace ddp;
  using Lambda = LambdaLR::Lambda;
  const auto power = [](double base) {
    return Lambda([=](int64_t epoch) { return std::pow(base, static_cast<double>(epoch)); });
  };
  const std::vector<Lambda> lambdas{
      [](int64_t epoch) { return 1 / (1 + static_cast<double>(epoch)); },
      [](int64_t epoch) { return std::pow(0.9, static_cast<double>(epoch / 10)); }};
  const auto many = OneCycleLROptions()
                        .max_lr({0.01, 0.02})
                        .epochs(10)
                        .steps_per_epoch(23)
                        .pct_start(0.25)
                        .anneal_strategy("linear")
                        .three_phase(true)
                        .base_momentum({0.8, 0.81})
                        .max_momentum(0.97)
                        .div_factor(10)
                        .final_div_factor(100);
  using Sequence = std::vector<LRScheduler*>;
  return {
      {"lambda", sgd, one<LambdaLR>(power(0.97))},
      {"lambdas", sgd, one<LambdaLR>(lambdas)},
      {"multi_step", sgd,
       one<MultiStepLR>(MultiStepLROptions().milestones({30, 80, 80, 120}).gamma(0.3))},
      {"multi_step_at_0", sgd, one<MultiStepLR>(std::vector<int64_t>{0, 5})},
      {"linear", sgd, one<LinearLR>()},
      {"linear_down", adam,
       one<LinearLR>(LinearLROptions().start_factor(0.9).end_factor(0.05).total_iters(150))},
      {"cosine", sgd, one<CosineAnnealingLR>(50)},
      {"cosine_eta", adam,
       one<CosineAnnealingLR>(CosineAnnealingLROptions().T_max(13).eta_min(1e-5))},
      {"cosine_1", sgd, one<CosineAnnealingLR>(CosineAnnealingLROptions(1).eta_min(0.01))},
      {"one_cycle", sgd, one<OneCycleLR>(OneCycleLROptions(0.4, 200))},
      {"one_cycle_adam", adam, one<OneCycleLR>(many)},
      {"one_cycle_lr_only", sgd,
       one<OneCycleLR>(OneCycleLROptions(0.4, 300).pct_start(0).cycle_momentum(false))},
      {"warm_up_and_cosine", sgd,
       [](auto& o) {
         const auto linear =
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.1).total_iters(7));
         const auto cosine =
             std::make_shared<CosineAnnealingLR>(o, CosineAnnealingLROptions(60).eta_min(1e-4));
         const auto both = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), cosine.get()}, std::vector<int64_t>{7});
         return Schedules{linear, cosine, both};
       }},
      {"three_in_another_order", adam,
       [=](auto& o) {
         const auto steps = std::make_shared<MultiStepLR>(
             o, MultiStepLROptions().milestones({0, 3, 8}).gamma(0.7));
         const auto lambda = std::make_shared<LambdaLR>(o, power(0.95));
         const auto linear =
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.3).total_iters(9));
         const auto all = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), lambda.get(), steps.get()}, std::vector<int64_t>{10, 90});
         return Schedules{steps, lambda, linear, all};
       }},
      {"one_cycle_behind", sgd,
       [](auto& o) {
         const auto linear = std::make_shared<LinearLR>(o, LinearLROptions().total_iters(4));
         const auto cycle = std::make_shared<OneCycleLR>(o, OneCycleLROptions(0.5, 250));
         const auto both = std::make_shared<SequentialLR>(
             o, Sequence{linear.get(), cycle.get()}, std::vector<int64_t>{20});
         return Schedules{linear, cycle, both};
       }},
      {"both", sgd,
       [](auto& o) {
         return Schedules{
             std::make_shared<LinearLR>(o, LinearLROptions().start_factor(0.2).total_iters(20)),
             std::make_shared<MultiStepLR>(
                 o, MultiStepLROptions().milestones({40, 100}).gamma(0.1))};
       },
       take_all},
  };
}

using Rate = ddp::LambdaLR::Lambda;
using List = std::vector<ddp::LRScheduler*>;

double real(int64_t epoch) { return static_cast<double>(epoch); }

template <typename T, typename... Args>
T* add(Schedules& schedules, torch::optim::Optimizer& o, Args&&... args) {
  auto made = std::make_shared<T>(o, std::forward<Args>(args)...);
  schedules.push_back(made);
  return made.get();
}

std::vector<Case> chainable_cases() {
  using namespace ddp;
  const std::vector<Rate> groups{
      [](int64_t epoch) { return 1 - 1 / (2 + real(epoch)); },
      [](int64_t epoch) { return epoch % 30 == 0 ? 0.9 : 1.0; }};
  return {
      {"constant", sgd, one<ConstantLR>()},
      {"constant_long", adam, one<ConstantLR>(ConstantLROptions().factor(0.7).total_iters(100))},
      {"exponential", sgd, one<ExponentialLR>(0.97)},
      {"polynomial", sgd, one<PolynomialLR>()},
      {"polynomial_power", adam,
       one<PolynomialLR>(PolynomialLROptions().total_iters(150).power(2.3))},
      {"multiplicative", sgd,
       one<MultiplicativeLR>(Rate([](int64_t epoch) { return 0.95 + 0.001 * real(epoch); }))},
      {"multiplicative_groups", adam, one<MultiplicativeLR>(groups)},
      {"swa", sgd, one<SWALR>(SWALROptions(0.05))},
      {"swa_linear", adam,
       one<SWALR>(
           SWALROptions().swa_lr({0.001, 0.002}).anneal_epochs(33).anneal_strategy("linear"))},
      {"swa_at_once", sgd, one<SWALR>(SWALROptions(0.05).anneal_epochs(0))},
      {"swa_behind", sgd,
       [](auto& o) {
         Schedules all;
         add<ExponentialLR>(all, o, 0.97);
         add<SWALR>(all, o, SWALROptions(0.05).anneal_epochs(15));
         return all;
       },
       take_in_turns},
      {"swa_beside", sgd,
       [](auto& o) {
         Schedules all;
         add<ExponentialLR>(all, o, 0.99);
         add<SWALR>(all, o, SWALROptions(0.05).anneal_epochs(60));
         return all;
       },
       take_all},
  };
}

std::vector<Case> cycle_cases() {
  using namespace ddp;
  using Restarts = CosineAnnealingWarmRestarts;
  using RestartsOptions = CosineAnnealingWarmRestartsOptions;
  const auto falling = [](double x) { return 1 / (3 + x); };
  return {
      {"restarts", sgd, one<Restarts>(13)},
      {"restarts_longer", adam, one<Restarts>(RestartsOptions(5).T_mult(3).eta_min(1e-5))},
      {"restarts_by_fractions", sgd, one<Restarts>(RestartsOptions(3).T_mult(2)), take_fraction},
      {"restarts_by_fractions_alike", sgd, one<Restarts>(4), take_fraction},
      {"cyclic", sgd, one<CyclicLR>(CyclicLROptions(0.01, 0.3).step_size_up(17))},
      {"cyclic_adam", adam,
       one<CyclicLR>(CyclicLROptions()
                         .base_lr({1e-4, 2e-4})
                         .max_lr({1e-2, 3e-2})
                         .step_size_up(11)
                         .step_size_down(23)
                         .mode("triangular2")
                         .base_momentum({0.7, 0.75})
                         .max_momentum(0.93))},
      {"cyclic_range", sgd,
       one<CyclicLR>(CyclicLROptions(0.001, 0.1).step_size_up(20).mode("exp_range").gamma(0.99))},
      {"cyclic_function", sgd,
       one<CyclicLR>(CyclicLROptions(0.001, 0.1)
                         .step_size_up(10)
                         .step_size_down(0)
                         .cycle_momentum(false)
                         .scale_fn(falling))},
      {"cyclic_function_of_step", sgd,
       one<CyclicLR>(CyclicLROptions(0.001, 0.1)
                         .step_size_up(10)
                         .scale_fn(falling)
                         .scale_mode("iterations"))},
      {"cycle_behind", sgd,
       [](auto& o) {
         Schedules all;
         add<LinearLR>(all, o, LinearLROptions().total_iters(4));
         add<CyclicLR>(all, o, CyclicLROptions(0.01, {0.3, 0.2}).step_size_up(9));
         add<SequentialLR>(all, o, List{all[0].get(), all[1].get()}, std::vector<int64_t>{20});
         return all;
       }},
  };
}

Schedules chained(torch::optim::Optimizer& o) {
  Schedules all;
  add<ddp::ConstantLR>(all, o, ddp::ConstantLROptions().factor(0.1).total_iters(12));
  add<ddp::ExponentialLR>(all, o, 0.98);
  all.push_back(std::make_shared<ddp::ChainedScheduler>(List{all[0].get(), all[1].get()}));
  return all;
}

Schedules chained_from_base(torch::optim::Optimizer& o) {
  Schedules all;
  auto* decay =
      add<ddp::PolynomialLR>(all, o, ddp::PolynomialLROptions().total_iters(150).power(0.7));
  auto* warm_up =
      add<ddp::LinearLR>(all, o, ddp::LinearLROptions().start_factor(0.2).total_iters(6));
  auto* cosine =
      add<ddp::CosineAnnealingLR>(all, o, ddp::CosineAnnealingLROptions(20).eta_min(1e-4));
  add<ddp::ChainedScheduler>(all, o, List{warm_up, cosine, decay});
  return all;
}

Schedules chained_and_set(torch::optim::Optimizer& o) {
  Schedules all;
  auto* decay = add<ddp::ExponentialLR>(all, o, 0.9);
  auto* lambda =
      add<ddp::LambdaLR>(all, o, Rate([](int64_t epoch) { return 0.5 + 1 / (2 + real(epoch)); }));
  add<ddp::ChainedScheduler>(all, o, List{lambda, decay});
  return all;
}

Schedules chained_around_sequence(torch::optim::Optimizer& o) {
  Schedules all;
  auto* warm_up =
      add<ddp::ConstantLR>(all, o, ddp::ConstantLROptions().factor(0.5).total_iters(100));
  auto* steps = add<ddp::MultiStepLR>(all, o, ddp::MultiStepLROptions({5, 60}).gamma(0.3));
  auto* both = add<ddp::SequentialLR>(all, o, List{warm_up, steps}, std::vector<int64_t>{40});
  auto* decay = add<ddp::MultiplicativeLR>(all, o, Rate([](int64_t) { return 0.99; }));
  add<ddp::ChainedScheduler>(all, o, List{both, decay});
  return all;
}

Schedules sequence_of_new(torch::optim::Optimizer& o) {
  using namespace ddp;
  Schedules all;
  add<ConstantLR>(all, o, ConstantLROptions().factor(0.3).total_iters(4));
  add<ExponentialLR>(all, o, 0.93);
  add<ConstantLR>(all, o, ConstantLROptions().factor(0.25).total_iters(6));
  add<PolynomialLR>(all, o, PolynomialLROptions().total_iters(30).power(2));
  add<MultiplicativeLR>(all, o, Rate([](int64_t epoch) { return 1 + 1 / (1 + real(epoch)); }));
  add<CosineAnnealingWarmRestarts>(
      all, o, CosineAnnealingWarmRestartsOptions(3).T_mult(2).eta_min(1e-5));
  add<SWALR>(all, o, SWALROptions(0.02).anneal_epochs(7));
  List list;
  for (const auto& schedule : all) list.push_back(schedule.get());
  add<SequentialLR>(all, o, list, std::vector<int64_t>{8, 20, 34, 60, 70, 120});
  return all;
}

std::vector<Case> all_cases() {
  auto all = cases();
  for (const auto& more : {chainable_cases(), cycle_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  all.push_back({"chained", sgd, chained});
  all.push_back({"chained_from_base", adam, chained_from_base});
  all.push_back({"chained_and_set", sgd, chained_and_set});
  all.push_back({"chained_around_sequence", sgd, chained_around_sequence});
  all.push_back({"sequence_of_new", sgd, sequence_of_new});
  return all;
}

void print(const std::string& name, int step, torch::optim::Optimizer& optimizer) {
  std::printf("%s %d", name.c_str(), step);
  for (const auto& group : optimizer.param_groups()) {
    std::printf(" %.17g", group.options().get_lr());
  }
  for (const auto& group : optimizer.param_groups()) {
    std::printf(" %.17g", momentum_of(group.options()));
  }
  std::printf("\n");
}

std::vector<std::string> saved(const Schedules& schedules) {
  std::vector<std::string> files;
  for (const auto& schedule : schedules) files.push_back(ddp::testing::bytes_of_archive(*schedule));
  return files;
}

void load(const Schedules& schedules, const std::vector<std::string>& files) {
  for (size_t i = 0; i < schedules.size(); ++i) {
    auto archive = ddp::testing::archive_of(files[i]);
    schedules[i]->load(archive);
  }
}

// Continues as a resumed run: constructs new objects, then loads the optimizer's options from its
// own file.
void resume(const Case& one, Optimizer& optimizer, Schedules& schedules) {
  const auto files = saved(schedules);
  auto fresh = one.make_optimizer();
  schedules = one.make(*fresh);
  load(schedules, files);
  for (size_t i = 0; i < fresh->param_groups().size(); ++i) {
    fresh->param_groups()[i].set_options(optimizer->param_groups()[i].options().clone());
  }
  optimizer = std::move(fresh);
}

}  // namespace

int main(int /*argc*/, char** /*argv*/) {
  constexpr int kSteps = 200;
  for (const auto& one : all_cases()) {
    auto optimizer = one.make_optimizer();
    auto schedules = one.make(*optimizer);
    for (int step = 0; step <= kSteps; ++step) {
      print(one.name, step, *optimizer);
      if (step == 33 || step == 90) resume(one, optimizer, schedules);
      if (step == kSteps) break;
      one.take(schedules, step);
    }
  }
  return 0;
}

}  // namespace ddp_lr_schedules_world
